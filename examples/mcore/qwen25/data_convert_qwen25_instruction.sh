#!/bin/bash
# Instruction data to tokens. Run from the root of the repository; every setting can be given from outside.
set -euo pipefail
INPUT=${INPUT:-./dataset/instructions.jsonl}
TOKENIZER_PATH=${TOKENIZER_PATH:-./models/Qwen2.5-7B}
OUTPUT_PREFIX=${OUTPUT_PREFIX:-./dataset/instructions}

python ./preprocess_data.py \
    --input "$INPUT" \
    --tokenizer-type PretrainedFromHF \
    --tokenizer-name-or-path "$TOKENIZER_PATH" \
    --output-prefix "$OUTPUT_PREFIX" \
    --handler-name AlpacaStyleInstructionHandler \
    --prompt-type "${PROMPT_TYPE:-qwen}" \
    --seq-length "${SEQ_LEN:-4096}" \
    --workers "${WORKERS:-4}" \
    --map-keys "${MAP_KEYS:-{\"prompt\":\"instruction\", \"query\":\"input\", \"response\":\"output\"\}}" \
    --log-interval 1000

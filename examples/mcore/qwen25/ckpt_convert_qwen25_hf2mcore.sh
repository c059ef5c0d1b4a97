#!/bin/bash
# Hugging Face weights to Megatron's. TP and PP need not be those of the training: it reads any layout.
set -euo pipefail
HF_DIR=${HF_DIR:-./models/Qwen2.5-7B}
TP=${TP:-1}
PP=${PP:-1}

python convert_ckpt.py \
    --use-mcore-models \
    --model-type GPT \
    --load-model-type hf \
    --save-model-type mg \
    --target-tensor-parallel-size "$TP" \
    --target-pipeline-parallel-size "$PP" \
    --add-qkv-bias \
    --load-dir "$HF_DIR" \
    --save-dir "${MCORE_DIR:-$HF_DIR/mcore_tp${TP}_pp${PP}/}" \
    --tokenizer-model "$HF_DIR/tokenizer.json" \
    --model-type-hf llama2 \
    --params-dtype "${DTYPE:-bf16}"

#!/bin/bash
# Talk to a model: `q` ends, `clear` forgets. CKPT_DIR is a Hugging Face directory or a checkpoint of any layout.
set -euo pipefail

torchrun --nproc_per_node "${NPUS_PER_NODE:-1}" inference.py \
    --task chat \
    --load "${CKPT_DIR:-./models/Qwen2.5-7B-tuned}" \
    --tensor-model-parallel-size "${TP:-1}" \
    --pipeline-model-parallel-size "${PP:-1}" \
    --prompt-type qwen \
    --max-new-tokens "${MAX_NEW_TOKENS:-256}" \
    --bf16

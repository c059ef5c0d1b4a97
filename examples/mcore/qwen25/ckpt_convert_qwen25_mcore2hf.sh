#!/bin/bash
# Weights of a training back to a Hugging Face directory.
set -euo pipefail

python convert_ckpt.py \
    --use-mcore-models \
    --model-type GPT \
    --load-model-type mg \
    --save-model-type hf \
    --load-dir "${CKPT_DIR:-./models/Qwen2.5-7B/mcore_tp1_pp1/ckpt}" \
    --save-dir "${HF_DIR:-./models/Qwen2.5-7B-tuned}"

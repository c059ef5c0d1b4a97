#!/bin/bash
# Fine-tune all weights of Qwen2.5-7B. The shape of the model comes from the checkpoint, and so does its layout:
# TP and PP below may differ from those of the conversion. The same command again goes on where a run ended.
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1

NPUS_PER_NODE=${NPUS_PER_NODE:-4}  # ranks of this machine; TP x PP has to divide NPUS_PER_NODE x NNODES
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}

CKPT_LOAD_DIR=${CKPT_LOAD_DIR:-./models/Qwen2.5-7B/mcore_tp1_pp1/}
CKPT_SAVE_DIR=${CKPT_SAVE_DIR:-./models/Qwen2.5-7B/mcore_tp1_pp1/ckpt}
DATA_PATH=${DATA_PATH:-./dataset/instructions}
TOKENIZER_PATH=${TOKENIZER_PATH:-./models/Qwen2.5-7B}

TP=${TP:-4}
PP=${PP:-1}
SEQ_LEN=${SEQ_LEN:-4096}
MBS=${MBS:-1}
GBS=${GBS:-8}
TRAIN_ITERS=${TRAIN_ITERS:-5000}

DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE
    --nnodes $NNODES
    --node_rank $NODE_RANK
    --master_addr $MASTER_ADDR
    --master_port $MASTER_PORT
"

TUNE_ARGS="
    --finetune
    --stage sft
    --is-instruction-dataset
    --prompt-type qwen
    --padded-samples
    --variable-seq-lengths
"

GPT_ARGS="
    --use-mcore-models
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size $PP
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --seq-length $SEQ_LEN
    --micro-batch-size $MBS
    --global-batch-size $GBS
    --train-iters $TRAIN_ITERS
    --lr 1.25e-6
    --min-lr 1.25e-7
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.0
    --clip-grad 1.0
    --adam-beta1 0.9
    --adam-beta2 0.95
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --use-flash-attn
    --use-fused-swiglu
    --use-fused-rmsnorm
    --use-fused-rotary-pos-emb
    --attention-softmax-in-fp32
    --tokenizer-type PretrainedFromHF
    --tokenizer-name-or-path $TOKENIZER_PATH
    --bf16
"

DATA_ARGS="--data-path $DATA_PATH --split 100,0,0"
CKPT_ARGS="--seed 1234"
OUTPUT_ARGS="--log-interval 1 --save-interval ${SAVE_INTERVAL:-5000} --eval-interval 5000 --eval-iters 0 --log-throughput"

mkdir -p logs
torchrun $DISTRIBUTED_ARGS posttrain_gpt.py \
    $GPT_ARGS \
    $DATA_ARGS \
    $CKPT_ARGS \
    $OUTPUT_ARGS \
    $TUNE_ARGS \
    --load "$CKPT_LOAD_DIR" \
    --save "$CKPT_SAVE_DIR" \
    --distributed-backend nccl \
    | tee logs/tune_mcore_qwen25_7b_full.log

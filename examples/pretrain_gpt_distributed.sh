#!/usr/bin/env bash
# GPT-2 345M, data parallel over the devices of one or several machines (run it on each with its NODE_RANK).
# Further flags, or other values of these: bash examples/pretrain_gpt_distributed.sh --train-iters 1000 --log-params-norm
set -euo pipefail
. "$(dirname "$0")/launch.sh"

CHECKPOINT_PATH=${CHECKPOINT_PATH:-experiments/gpt2-345m}
VOCAB_FILE=${VOCAB_FILE:-gpt2-vocab.json}
MERGE_FILE=${MERGE_FILE:-gpt2-merges.txt}
DATA_PATH=${DATA_PATH:-my-gpt2_text_document}

GPT_ARGS=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 1024
    --max-position-embeddings 1024
    --micro-batch-size 8
    --global-batch-size 64
    --lr 0.00015
    --train-iters 500000
    --lr-decay-iters 320000
    --lr-decay-style cosine
    --min-lr 1.0e-5
    --weight-decay 1e-2
    --lr-warmup-fraction .01
    --clip-grad 1.0
    --fp16
)

DATA_ARGS=(
    --data-path "$DATA_PATH"
    --vocab-file "$VOCAB_FILE"
    --merge-file "$MERGE_FILE"
    --split 949,50,1
)

OUTPUT_ARGS=(
    --log-interval 100
    --save-interval 10000
    --eval-interval 1000
    --eval-iters 10
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
)

launch "${GPT_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" -- "$@"

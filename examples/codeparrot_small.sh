#!/usr/bin/env bash
# CodeParrot small: GPT-2 110M on code, the settings of the public tutorial (8 devices).
# Further flags, or other values of these: bash examples/codeparrot_small.sh --train-iters 1000 --log-params-norm
set -euo pipefail
. "$(dirname "$0")/launch.sh"

MASTER_PORT=${MASTER_PORT:-6001}

CHECKPOINT_PATH=${CHECKPOINT_PATH:-experiments/codeparrot-small}
VOCAB_FILE=${VOCAB_FILE:-vocab.json}
MERGE_FILE=${MERGE_FILE:-merges.txt}
DATA_PATH=${DATA_PATH:-codeparrot_content_document}

GPT_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --num-layers 12
    --hidden-size 768
    --num-attention-heads 12
    --seq-length 1024
    --max-position-embeddings 1024
    --micro-batch-size 12
    --global-batch-size 192
    --lr 0.0005
    --train-iters 150000
    --lr-decay-iters 150000
    --lr-decay-style cosine
    --lr-warmup-iters 2000
    --weight-decay .1
    --adam-beta2 .999
    --fp16
)

DATA_ARGS=(
    --data-path "$DATA_PATH"
    --vocab-file "$VOCAB_FILE"
    --merge-file "$MERGE_FILE"
)

OUTPUT_ARGS=(
    --log-interval 10
    --save-interval 2000
    --eval-interval 200
    --eval-iters 10
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --tensorboard-dir experiments/tensorboard
)

launch "${GPT_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" -- "$@"

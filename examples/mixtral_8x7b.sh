#!/usr/bin/env bash
# Mixtral 8x7B on 64 devices, pipeline parallel 4 x expert parallel 8 over data parallel 16.
# Model, layout, batch and rates, and where they come from: configs/mixtral-8x7b.yaml.
# Further flags, or other values of these: bash examples/mixtral_8x7b.sh --train-iters 1000 --dry-run
set -euo pipefail
. "$(dirname "$0")/launch.sh"

NNODES=${NNODES:-8}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-experiments/mixtral_8x7b}
TOKENIZER_MODEL=${TOKENIZER_MODEL:-Mixtral-8x7B-v0.1}    # a folder with tokenizer.json; nothing is downloaded
DATA_PATH=${DATA_PATH:-my-data_text_document}    # made with --tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER_MODEL

MODEL_ARGS=(
    --config mixtral-8x7b
)

DATA_ARGS=(
    --data-path "$DATA_PATH"
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$TOKENIZER_MODEL"
    --split 99,1,0
)

OUTPUT_ARGS=(
    --log-interval 10
    --save-interval 1000
    --eval-interval 1000
    --eval-iters 10
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --tensorboard-dir "$CHECKPOINT_PATH/tensorboard"
)

launch "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" -- "$@"

#!/usr/bin/env bash
# Qwen3 0.6B on one machine, data parallel.
# Model, layout, batch and rates, and where they come from: configs/qwen3-0.6b.yaml.
# Further flags, or other values of these: bash examples/qwen3_0.6b.sh --train-iters 1000 --dry-run
set -euo pipefail
. "$(dirname "$0")/launch.sh"

CHECKPOINT_PATH=${CHECKPOINT_PATH:-experiments/qwen3_0.6b}
TOKENIZER_MODEL=${TOKENIZER_MODEL:-Qwen3-0.6B-Base}    # a folder with tokenizer.json; nothing is downloaded
DATA_PATH=${DATA_PATH:-my-data_text_document}    # made with --tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER_MODEL

MODEL_ARGS=(
    --config qwen3-0.6b
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

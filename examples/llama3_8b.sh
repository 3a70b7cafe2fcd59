#!/usr/bin/env bash
# Llama-3 8B on 64 devices, tensor parallel 2 x data parallel 32.
# Model, layout, batch and rates, and where they come from: configs/llama3-8b.yaml.
# Further flags, or other values of these: bash examples/llama3_8b.sh --train-iters 1000 --dry-run
set -euo pipefail
. "$(dirname "$0")/launch.sh"

NNODES=${NNODES:-8}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-experiments/llama3_8b}
TOKENIZER_MODEL=${TOKENIZER_MODEL:-Meta-Llama-3-8B}    # a folder with tokenizer.json; nothing is downloaded
DATA_PATH=${DATA_PATH:-my-data_text_document}    # made with --tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER_MODEL

MODEL_ARGS=(
    --config llama3-8b
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

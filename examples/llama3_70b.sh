#!/usr/bin/env bash
# Llama-3 70B on 512 devices, tensor parallel 8 x pipeline parallel 4 (interleaved) x data parallel 16.
# Model, layout, batch and rates, and where they come from: configs/llama3-70b.yaml.
# Further flags, or other values of these: bash examples/llama3_70b.sh --train-iters 1000 --dry-run
set -euo pipefail
. "$(dirname "$0")/launch.sh"

NNODES=${NNODES:-64}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-experiments/llama3_70b}
TOKENIZER_MODEL=${TOKENIZER_MODEL:-Meta-Llama-3-70B}    # a folder with tokenizer.json; nothing is downloaded
DATA_PATH=${DATA_PATH:-my-data_text_document}    # made with --tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER_MODEL

MODEL_ARGS=(
    --config llama3-70b
    --num-layers-per-virtual-pipeline-stage 5
)

DATA_ARGS=(
    --data-path "$DATA_PATH"
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$TOKENIZER_MODEL"
    --split 99,1,0
)

OUTPUT_ARGS=(
    --log-interval 10
    --save-interval 500
    --eval-interval 1000
    --eval-iters 10
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --tensorboard-dir "$CHECKPOINT_PATH/tensorboard"
)

launch "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" -- "$@"

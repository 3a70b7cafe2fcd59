#!/usr/bin/env bash
# GPT-3 175B on 1024 devices, tensor parallel 8 x pipeline parallel 16 x data parallel 8.
# Model, layout, batch and rates, and where they come from: configs/gpt3-175b.yaml.
# Further flags, or other values of these: bash examples/gpt3_175b.sh --train-samples 10000000 --dry-run
set -euo pipefail
. "$(dirname "$0")/launch.sh"

NNODES=${NNODES:-128}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-experiments/gpt3_175b}
VOCAB_FILE=${VOCAB_FILE:-gpt2-vocab.json}
MERGE_FILE=${MERGE_FILE:-gpt2-merges.txt}
DATA_PATH=${DATA_PATH:-my-gpt2_text_document}

MODEL_ARGS=(
    --config gpt3-175b
)

DATA_ARGS=(
    --data-path "$DATA_PATH"
    --vocab-file "$VOCAB_FILE"
    --merge-file "$MERGE_FILE"
    --split 98,2,0
)

OUTPUT_ARGS=(
    --log-interval 10
    --save-interval 1000
    --eval-interval 1000
    --eval-iters 40
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --tensorboard-dir "$CHECKPOINT_PATH/tensorboard"
)

launch "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" -- "$@"

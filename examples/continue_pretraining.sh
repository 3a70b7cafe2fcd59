#!/usr/bin/env bash
# Trains on from a Hugging Face model in a folder (nothing is downloaded), and resumes when called again.
# Further flags, or other values of these: bash examples/continue_pretraining.sh --seq-length 4096 --train-iters 5000
set -euo pipefail
. "$(dirname "$0")/launch.sh"

GPUS_PER_NODE=${GPUS_PER_NODE:-1}
HF_MODEL=${HF_MODEL:-my-model}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-experiments/continued}
DATA_PATH=${DATA_PATH:-my-data_text_document}    # made with --tokenizer-type HuggingFaceTokenizer --tokenizer-model $HF_MODEL

FROM=(--load "$HF_MODEL" --finetune)
if [ -e "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt" ]; then
    FROM=(--load "$CHECKPOINT_PATH" --use-checkpoint-args)
fi

TRAINING_ARGS=(
    --seq-length 1024
    --attention-dropout 0
    --hidden-dropout 0
    --micro-batch-size 1
    --global-batch-size 16
    --train-iters 1000
    --lr 2.0e-5
    --min-lr 2.0e-6
    --lr-decay-style cosine
    --lr-warmup-fraction .01
    --weight-decay 0.1
    --clip-grad 1.0
    --bf16
)

DATA_ARGS=(
    --data-path "$DATA_PATH"
    --split 98,2,0
)

OUTPUT_ARGS=(
    --log-interval 10
    --save-interval 500
    --eval-interval 500
    --eval-iters 10
    --save "$CHECKPOINT_PATH"
)

launch "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "${FROM[@]}" -- "$@"

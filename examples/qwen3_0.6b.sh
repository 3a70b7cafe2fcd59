#!/usr/bin/env bash
# Qwen3 0.6B on one machine, data parallel.
# Shape: config.json of Qwen/Qwen3-0.6B. 4096 tokens a sequence: the first stage of the Qwen3 report (arXiv 2505.09388), section 3.2.
# Rates and batch come from its scaling laws and are not published: those here are ours.
# Further flags, or other values of these: bash examples/qwen3_0.6b.sh --train-iters 1000 --dry-run
set -euo pipefail
. "$(dirname "$0")/launch.sh"

CHECKPOINT_PATH=${CHECKPOINT_PATH:-experiments/qwen3_0.6b}
TOKENIZER_MODEL=${TOKENIZER_MODEL:-Qwen3-0.6B-Base}    # a folder with tokenizer.json; nothing is downloaded
DATA_PATH=${DATA_PATH:-my-data_text_document}    # made with --tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER_MODEL

MODEL_ARGS=(
    --num-layers 28
    --hidden-size 1024
    --ffn-hidden-size 3072
    --num-attention-heads 16
    --num-query-groups 8
    --kv-channels 128
    --qk-layernorm
    --norm-epsilon 1e-6
    --seq-length 4096
    --max-position-embeddings 40960
    --rotary-base 1000000
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --attention-dropout 0
    --hidden-dropout 0
)

LAYOUT_ARGS=(
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 256
    --train-iters 100000
    --lr 3.0e-4
    --min-lr 3.0e-5
    --lr-decay-style cosine
    --lr-warmup-iters 1000
    --adam-beta1 0.9
    --adam-beta2 0.95
    --weight-decay 0.1
    --clip-grad 1.0
    --bf16
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

launch "${MODEL_ARGS[@]}" "${LAYOUT_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" -- "$@"

#!/usr/bin/env bash
# Llama-2 7B on one machine with stage 3 of ZeRO: its devices divide weights, gradients and the state of the optimizer.
# Shape, rates, betas, epsilon and 4M tokens a step: "Llama 2" (arXiv 2307.09288), section 2.2 and config.json of meta-llama/Llama-2-7b-hf;
# 500000 steps are its 2T tokens.
# Further flags, or other values of these: bash examples/zero3_one_node.sh --train-iters 1000 --dry-run
set -euo pipefail
. "$(dirname "$0")/launch.sh"

CHECKPOINT_PATH=${CHECKPOINT_PATH:-experiments/zero3_one_node}
TOKENIZER_MODEL=${TOKENIZER_MODEL:-Llama-2-7b-hf}    # a folder with tokenizer.json; nothing is downloaded
DATA_PATH=${DATA_PATH:-my-data_text_document}    # made with --tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER_MODEL

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 11008
    --num-attention-heads 32
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
)

LAYOUT_ARGS=(
    --zero-stage 3
    --recompute-activations
)

TRAINING_ARGS=(
    --micro-batch-size 2
    --global-batch-size 1024
    --train-iters 500000
    --lr 3.0e-4
    --min-lr 3.0e-5
    --lr-decay-style cosine
    --lr-warmup-iters 2000
    --adam-eps 1e-5
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
    --save-interval 500
    --eval-interval 1000
    --eval-iters 10
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --tensorboard-dir "$CHECKPOINT_PATH/tensorboard"
)

launch "${MODEL_ARGS[@]}" "${LAYOUT_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" -- "$@"

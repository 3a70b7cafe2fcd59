#!/usr/bin/env bash
# Mixtral 8x7B on 64 devices, pipeline parallel 4 x expert parallel 8 over data parallel 16.
# Shape: "Mixtral of Experts" (arXiv 2401.04088), table 1, and config.json of mistralai/Mixtral-8x7B-v0.1. The paper tells no rates: these, the
# batch and the layout are of Megatron-LM, examples/mixtral/train_mixtral_8x7b_distributed.sh.
# Further flags, or other values of these: bash examples/mixtral_8x7b.sh --train-iters 1000 --dry-run
set -euo pipefail
. "$(dirname "$0")/launch.sh"

NNODES=${NNODES:-8}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-experiments/mixtral_8x7b}
TOKENIZER_MODEL=${TOKENIZER_MODEL:-Mixtral-8x7B-v0.1}    # a folder with tokenizer.json; nothing is downloaded
DATA_PATH=${DATA_PATH:-my-data_text_document}    # made with --tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER_MODEL

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --num-query-groups 8
    --seq-length 4096
    --max-position-embeddings 32768
    --rotary-base 1000000
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
    --init-method-std 0.01
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 0.01
)

LAYOUT_ARGS=(
    --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 256
    --train-iters 500000
    --lr 1.0e-4
    --min-lr 1.0e-5
    --lr-decay-style cosine
    --lr-decay-iters 320000
    --lr-warmup-iters 500
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

#!/usr/bin/env bash
# Llama-3 70B on 512 devices, tensor parallel 8 x pipeline parallel 4 (interleaved) x data parallel 16.
# Shape and peak rate: "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3. Warm-up, length and end of the decay, and 4M tokens
# a step, here of 8192 tokens a sequence, are what its section 3.4 has for 405B, the one size that it describes. It names neither betas
# nor decay of weights: those are of Llama 2 (arXiv 2307.09288), section 2.2.
# Further flags, or other values of these: bash examples/llama3_70b.sh --train-iters 1000 --dry-run
set -euo pipefail
. "$(dirname "$0")/launch.sh"

NNODES=${NNODES:-64}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-experiments/llama3_70b}
TOKENIZER_MODEL=${TOKENIZER_MODEL:-Meta-Llama-3-70B}    # a folder with tokenizer.json; nothing is downloaded
DATA_PATH=${DATA_PATH:-my-data_text_document}    # made with --tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER_MODEL

MODEL_ARGS=(
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
    --num-query-groups 8
    --seq-length 8192
    --max-position-embeddings 8192
    --rotary-base 500000
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
)

LAYOUT_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 4
    --num-layers-per-virtual-pipeline-stage 5
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 512
    --train-iters 1200000
    --lr 1.5e-4
    --min-lr 1.5e-6
    --lr-decay-style cosine
    --lr-warmup-iters 8000
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

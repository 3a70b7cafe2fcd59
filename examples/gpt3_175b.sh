#!/usr/bin/env bash
# GPT-3 175B on 1024 devices, tensor parallel 8 x pipeline parallel 16 x data parallel 8.
# Shape, rates, betas, batch and the lengths of warm-up, ramp and decay: Brown et al. 2020 (arXiv 2005.14165), section 2 and
# appendix B: 300B tokens of 2048 each, 375M of warm-up, decay to a tenth over 260B, 3.2M tokens a step after a ramp from 32k.
# It names no dropout, and none is used here.
# Layout and standard deviation of the initial weights: Megatron-LM 23.06, examples/pretrain_gpt3_175B.sh.
# Further flags, or other values of these: bash examples/gpt3_175b.sh --train-samples 10000000 --dry-run
set -euo pipefail
. "$(dirname "$0")/launch.sh"

NNODES=${NNODES:-128}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-experiments/gpt3_175b}
VOCAB_FILE=${VOCAB_FILE:-gpt2-vocab.json}
MERGE_FILE=${MERGE_FILE:-gpt2-merges.txt}
DATA_PATH=${DATA_PATH:-my-gpt2_text_document}

MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --init-method-std 0.006
    --attention-dropout 0
    --hidden-dropout 0
)

LAYOUT_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 16
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --train-samples 146484375
    --lr 6.0e-5
    --min-lr 6.0e-6
    --lr-decay-style cosine
    --lr-decay-samples 126953125
    --lr-warmup-samples 183105
    --adam-beta1 0.9
    --adam-beta2 0.95
    --weight-decay 0.1
    --clip-grad 1.0
    --bf16
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

launch "${MODEL_ARGS[@]}" "${LAYOUT_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" -- "$@"

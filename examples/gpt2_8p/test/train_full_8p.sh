#!/usr/bin/env bash
# Trains the chosen size to the end, saves it in ckpts/ckpts_tmp, and shows samples/s and perplexity beside the
# published ones. The same line again resumes.
#   bash ./test/train_full_8p.sh --data_path=./data --model_size=345M --train_iters=500000 [--devices=8] [--dry-run]
# Sizes: 345M, 1.3B, 2.7B, 3.7B, 345M_without_mp, and tiny for a laptop. Other flags go on to pretrain_gpt.py.
set -euo pipefail
. "$(dirname "$0")/recipe.sh"

data_path=$RECIPE/data          # what test/dataset_preprocess_gpt.sh wrote
model_size=345M
train_iters=500000
devices=                        # unset: all accelerators up to 8, or one process on the CPU
LOG_INTERVAL=100                # or a tenth of train_iters

read_options "data_path model_size train_iters devices" "$@"
CHECKPOINT_ARGS=(
    --save "$RECIPE/ckpts/ckpts_tmp"
    --load "$RECIPE/ckpts/ckpts_tmp"
    --save-interval 10000       # and at the end
    --eval-interval 1000        # and at the end, which gives the perplexity of the table
    --eval-iters 10             # global batches of the validation split
)
train full "${CHECKPOINT_ARGS[@]}"

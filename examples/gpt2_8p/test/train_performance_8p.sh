#!/usr/bin/env bash
# Measures samples/s of the chosen size, and shows them beside the published ones. Nothing is evaluated or saved.
#   bash ./test/train_performance_8p.sh --data_path=./data --model_size=345M --train_iters=200 [--devices=8] [--dry-run]
# Sizes: 345M, 1.3B, 2.7B, 3.7B, 345M_without_mp, and tiny for a laptop. Other flags go on to pretrain_gpt.py.
set -euo pipefail
. "$(dirname "$0")/recipe.sh"

data_path=$RECIPE/data          # what test/dataset_preprocess_gpt.sh wrote
model_size=345M
train_iters=500000              # the recipe's; a few hundred are enough to measure
devices=                        # unset: all accelerators up to 8, or one process on the CPU
LOG_INTERVAL=100                # or a tenth of train_iters

read_options "data_path model_size train_iters devices" "$@"
train performance --eval-iters 0

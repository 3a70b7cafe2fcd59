#!/usr/bin/env bash
# From nothing to a trained GPT that `transformers` opens, on any machine, in about five minutes.
#   bash examples/quickstart.sh [--train-iters N] [--dir DIR]
# Everything it makes is under quickstart/ (or DIR) and .venv; run again, it repeats neither set-up nor preprocessing.
set -euo pipefail

TRAIN_ITERS=360                 # steps; the loss falls visibly within the first hundred
DIR=quickstart                  # corpus, tokenizer, dataset, checkpoints, logs, exported model
VOCAB_SIZE=4096                 # entries of the byte-level BPE that is trained on the corpus
MODEL="--num-layers 4 --hidden-size 192 --ffn-hidden-size 512 --num-attention-heads 3 --seq-length 256
       --max-position-embeddings 256 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
       --attention-dropout 0 --hidden-dropout 0"
SCHEDULE="--lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1 --adam-beta2 0.95"
GLOBAL_BATCH=8                  # sequences per step, whatever the number of devices

while [ $# -gt 0 ]; do
    case $1 in
        --train-iters) TRAIN_ITERS=${2:?--train-iters needs a number} ;;
        --dir) DIR=${2:?--dir needs a folder} ;;
        *) echo "error: $1: not an option of quickstart.sh; it has --train-iters N and --dir DIR" >&2; exit 2 ;;
    esac
    shift 2
done
case $TRAIN_ITERS in
    '' | *[!0-9]* | 0 | 1) echo "error: --train-iters $TRAIN_ITERS: a number of at least 2 is needed" >&2; exit 2 ;;
esac

CALLED_FROM=$PWD
cd "$(dirname "$0")/.."
case $DIR in /*) ;; quickstart) ;; *) DIR=$CALLED_FROM/$DIR ;; esac
RUN=$DIR/run
TIMES=""
STEP=""
step() {                        # closes the step before, opens the next
    [ -z "$STEP" ] || TIMES+=$(printf '  %-34s %5d s' "$STEP" $((SECONDS - STEP_START)))$'\n'
    STEP=$1 STEP_START=$SECONDS
    [ -z "$STEP" ] || printf '\n=== %s\n' "$STEP"
}
trap 'status=$?; [ $status -eq 0 ] || echo "quickstart stopped in step \"$STEP\" (exit code $status). Run it again: finished steps are kept." >&2' EXIT

step "1/8 environment"
. examples/setup.sh
setup_environment
mkdir -p "$DIR"

step "2/8 corpus"
CORPUS=$DIR/corpus.json
if [ -f "$CORPUS" ]; then
    echo "$CORPUS is already there"
else
    "$PYTHON" tools/make_stdlib_corpus.py --output "$CORPUS"
fi

step "3/8 tokenizer"
if [ "$DIR/vocab.json" -nt "$CORPUS" ] && [ "$DIR/merges.txt" -nt "$CORPUS" ]; then
    echo "$DIR/vocab.json and merges.txt are already there"
else
    "$PYTHON" tools/train_tokenizer.py --input "$CORPUS" --json-key content --vocab-size "$VOCAB_SIZE" \
        --output-dir "$DIR" --overwrite
fi

step "4/8 preprocessing"
DATA=$DIR/corpus_content_document
if [ "$DATA.idx" -nt "$DIR/vocab.json" ] && [ "$DATA.idx" -nt "$DIR/merges.txt" ]; then
    echo "$DATA.bin and .idx are already there"
else
    "$PYTHON" tools/preprocess_data.py --input "$CORPUS" --output-prefix "$DIR/corpus" --json-keys content \
        --tokenizer-type GPT2BPETokenizer --vocab-file "$DIR/vocab.json" --merge-file "$DIR/merges.txt" \
        --workers 2 --append-eod --overwrite
fi

DEVICES=$("$PYTHON" -c 'import torch; print(torch.accelerator.device_count() if torch.accelerator.is_available() else 0)')
if [ "$DEVICES" -eq 0 ]; then   # two processes of one thread: on few cores faster than one with two
    PROCESSES=2 PRECISION=""
    export OMP_NUM_THREADS=1
else
    PROCESSES=1 PRECISION="--bf16"
    while [ $((PROCESSES * 2)) -le "$DEVICES" ] && [ $((PROCESSES * 2)) -le "$GLOBAL_BATCH" ]; do
        PROCESSES=$((PROCESSES * 2))
    done
fi
HALF=$(((TRAIN_ITERS + 1) / 2))

train() {                       # the same command twice: it stops at the first multiple of HALF, then resumes
    # shellcheck disable=SC2086 # the settings at the top are lists of words
    "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$PROCESSES" pretrain_gpt.py \
        $MODEL $SCHEDULE $PRECISION \
        --micro-batch-size $((GLOBAL_BATCH / PROCESSES)) --global-batch-size "$GLOBAL_BATCH" \
        --train-iters "$TRAIN_ITERS" --exit-interval "$HALF" --save-interval "$TRAIN_ITERS" \
        --log-interval 10 --eval-interval "$HALF" --eval-iters 4 \
        --tokenizer-type GPT2BPETokenizer --vocab-file "$DIR/vocab.json" --merge-file "$DIR/merges.txt" \
        --data-path "$DATA" --save "$RUN/checkpoints" --load "$RUN/checkpoints" \
        --tensorboard-dir "$RUN/tensorboard" --metrics-jsonl "$RUN/metrics.jsonl"
}

step "5/8 training, first half"
if [ -d "$RUN" ]; then
    echo "the run of last time is replaced: $RUN"
    rm -r "$RUN"
fi
mkdir -p "$RUN"
echo "$PROCESSES processes; accelerators found: $DEVICES"
train

step "6/8 training, resumed"
train
"$PYTHON" tools/plot_loss.py --metrics-jsonl "$RUN/metrics.jsonl"

step "7/8 export to Hugging Face"
"$PYTHON" tools/convert_checkpoint.py --load "$RUN/checkpoints" --to hf --save "$RUN/hf"

step "8/8 text from transformers"
HF_HUB_OFFLINE=1 "$PYTHON" - "$RUN/hf" <<'PYTHON'
import sys

from transformers import pipeline, set_seed
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
set_seed(1234)
generate = pipeline("text-generation", model=sys.argv[1])
print(generate("def hello_world():", max_new_tokens=64, do_sample=True, temperature=0.6, top_k=40)[0]["generated_text"])
PYTHON

step ""
printf '\nDone in %d s:\n%s' "$SECONDS" "$TIMES"
cat <<END

The model for transformers   $RUN/hf
The loss curves              .venv/bin/python -m tensorboard.main --logdir $RUN/tensorboard
More text                    .venv/bin/python tools/generate.py --load $RUN/checkpoints --prompt "class Stack:"
To enter the environment     source .venv/bin/activate
Where to read on             docs/first_run.md
END

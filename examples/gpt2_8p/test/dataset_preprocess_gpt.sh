#!/usr/bin/env bash
# Text to data/my-gpt_text_sentence.bin and .idx, cut into sentences. GPT then shuffles sentences, not documents.
#   bash ./test/dataset_preprocess_gpt.sh [--input=corpus.json] [--data_path=./data] [--vocab_size=N] [--dry-run]
# The corpus is JSON lines with the text under "text": data/my-corpus.json, or --input. The vocabulary is
# data/gpt2-vocab.json and gpt2-merges.txt; where they are missing, --vocab_size=N trains one on the corpus. Without any
# corpus, one is made of this Python's standard library, with its vocabulary. Other flags go on to preprocess_data.py.
set -euo pipefail
. "$(dirname "$0")/recipe.sh"

data_path=$RECIPE/data
input=                          # unset: my-corpus.json of the data folder
vocab_size=                     # unset: the vocabulary that is there
OWN_CORPUS_MEGABYTES=${OWN_CORPUS_MEGABYTES:-20}    # of the corpus that is made where there is none
OWN_VOCAB_SIZE=${OWN_VOCAB_SIZE:-8192}              # and of its vocabulary

read_options "input data_path vocab_size" "$@"
data_path=$(from_caller "$data_path")
vocab=$data_path/gpt2-vocab.json merges=$data_path/gpt2-merges.txt
[ -z "$input" ] || input=$(from_caller "$input")
[ -n "$input" ] || [ ! -f "$data_path/my-corpus.json" ] || input=$data_path/my-corpus.json
if [ -f "$vocab" ] && [ -f "$merges" ]; then
    [ -z "$vocab_size" ] || fail "--vocab_size=$vocab_size: $vocab is there; leave the option out, or move that file away"
else
    [ -n "$input" ] || vocab_size=${vocab_size:-$OWN_VOCAB_SIZE}
    [ -n "$vocab_size" ] || fail "$vocab or gpt2-merges.txt is not there: put GPT-2's there, or train one: --vocab_size=50257"
    whole_number --vocab_size "$vocab_size"
    [ ! -f "$vocab" ] || fail "$vocab: gpt2-merges.txt is not beside it; put it there, or move this file away"
    [ ! -f "$merges" ] || fail "$merges: gpt2-vocab.json is not beside it; put it there, or move this file away"
fi

# run WORDS...   prints the command with --dry-run, else runs it.
run() { if [ "$dry_run" = 1 ]; then printf '%q ' "$@"; echo; else "$@"; fi; }

if [ -z "$input" ]; then
    input=$data_path/stdlib-corpus.json
    if [ ! -f "$input" ]; then
        echo "no --input and no $data_path/my-corpus.json: a corpus is made of this Python's standard library" >&2
        run "$PYTHON" "$ROOT/tools/make_stdlib_corpus.py" --output "$input" --json-key text \
            --max-megabytes "$OWN_CORPUS_MEGABYTES"
    fi
fi
if [ -n "$vocab_size" ]; then
    echo "no $vocab with gpt2-merges.txt: $vocab_size entries are trained on the corpus" >&2
    made=$data_path/vocab_of_$vocab_size
    run "$PYTHON" "$ROOT/tools/train_tokenizer.py" --input "$input" --json-key text --vocab-size "$vocab_size" \
        --output-dir "$made" --overwrite
    run mv "$made/merges.txt" "$merges"
    run mv "$made/vocab.json" "$vocab"
    run rmdir "$made"
fi
run "$PYTHON" "$ROOT/tools/preprocess_data.py" --input "$input" --output-prefix "$data_path/my-gpt" --json-keys text \
    --tokenizer-type GPT2BPETokenizer --vocab-file "$vocab" --merge-file "$merges" --split-sentences --append-eod \
    "${PASSED_ON[@]}"

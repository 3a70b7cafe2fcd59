#!/usr/bin/env bash
# Makes what the pages of docs/ begin with, in the folder where it is started: a corpus, a tokenizer, a dataset, settings,
# a trained run and its export. Takes about a minute on two cores; what is there already is kept.
#   bash examples/small_run.sh
set -euo pipefail
tools=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-python}

if [ ! -f corpus.json ]; then
    "$PYTHON" "$tools/tools/make_stdlib_corpus.py" --output corpus.json --max-megabytes 1
fi
if [ ! -f merges.txt ]; then
    "$PYTHON" "$tools/tools/train_tokenizer.py" --input corpus.json --json-key content --vocab-size 1024 --output-dir .
fi
if [ ! -f corpus_content_document.meta.json ]; then
    "$PYTHON" "$tools/tools/preprocess_data.py" --input corpus.json --json-keys content --output-prefix corpus \
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt --workers 2 --append-eod
fi
cat > small.yaml <<END
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, max_position_embeddings: 128}
data: {data_path: [corpus_content_document], seq_length: 128}
tokenizer: {vocab_file: vocab.json, merge_file: merges.txt}
training: {micro_batch_size: 4, global_batch_size: 8, train_iters: 8}
schedule: {lr: 1.0e-3, lr_decay_style: cosine, lr_warmup_iters: 2}
evaluation: {eval_interval: 4, eval_iters: 1}
END
if [ ! -f runs/small/latest_checkpointed_iteration.txt ]; then
    "$PYTHON" "$tools/pretrain_gpt.py" --config small.yaml --save runs/small --log-interval 4
fi
if [ ! -f my-model/config.json ]; then
    "$PYTHON" "$tools/tools/convert_checkpoint.py" --load runs/small --to hf --save my-model
fi
echo "corpus.json, vocab.json, merges.txt, corpus_content_document, small.yaml, runs/small and my-model are here"

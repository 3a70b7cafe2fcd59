"""Command lines of public tutorials and scripts, as users type them (what follows `pretrain_gpt.py`)."""

from __future__ import annotations

import shlex

TUTORIAL = """
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
    --num-layers 12 --hidden-size 768 --num-attention-heads 12
    --seq-length 1024 --max-position-embeddings 1024
    --micro-batch-size 12 --global-batch-size 192
    --lr 0.0005 --train-iters 150000 --lr-decay-iters 150000 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay .1 --adam-beta2 .999 --fp16
    --log-interval 10 --save-interval 2000 --eval-interval 200 --eval-iters 10
    --vocab-file vocab.json --merge-file merges.txt
    --save experiments/codeparrot-small --load experiments/codeparrot-small
    --data-path codeparrot_content_document --tensorboard-dir experiments/tensorboard
"""

_GPT_345M = """
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
    --lr 0.00015 --train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5
    --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --fp16
    --data-path my-gpt2_text_document --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --data-impl mmap
    --split 949,50,1 --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10
    --save ckpt --load ckpt
"""
CLASSIC = {
    "pretrain_gpt.sh": _GPT_345M + "--micro-batch-size 4 --global-batch-size 8",
    "pretrain_gpt_distributed.sh": _GPT_345M + "--micro-batch-size 8 --global-batch-size 64 --distributed-backend nccl",
}
WITH_MODEL_PARALLELISM = {
    "pretrain_gpt_distributed_with_mp.sh": _GPT_345M
    + """--micro-batch-size 4 --global-batch-size 16 --distributed-backend nccl
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel""",
    "pretrain_gpt3_175B.sh": """
        --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-layers 96 --hidden-size 12288
        --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1
        --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --train-samples 146484375
        --lr-decay-samples 126953125 --lr-warmup-samples 183105 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine
        --log-interval 10 --eval-iters 40 --eval-interval 1000 --data-path 0.2 d1 0.3 d2 0.5 d3
        --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --save-interval 1000 --save ckpt --load ckpt
        --split 98,2,0 --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006
        --tensorboard-dir tb --fp16 --activations-checkpoint-method uniform""",
}
LLAMA3 = """
    --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0
    --hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --attention-backend fused --normalization RMSNorm
    --apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1
    --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252
    --lr 0.00015 --min-lr 0.00001 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9
    --adam-beta2 0.95 --bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc
    --empty-unused-memory-level 0 --exit-duration-in-mins 235 --context-parallel-size 1
    --tensor-model-parallel-size 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 128256
    --split 99,1,0 --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1
    --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput
    --ckpt-format torch --distributed-timeout-minutes 60 --save ckpt --load ckpt --tensorboard-dir tb
"""

SMALL = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --lr 1e-3 --train-iters 100 --mock-data --vocab-size 100
"""


def argv(*commands: str) -> list[str]:
    return shlex.split(" ".join(commands))


def without(command: str, *flags: str) -> str:
    """The command without these flags and their values."""
    words, kept, skipping = shlex.split(command), [], False
    for word in words:
        if word.startswith("--"):
            skipping = word in flags
        if not skipping:
            kept.append(word)
    return shlex.join(kept)

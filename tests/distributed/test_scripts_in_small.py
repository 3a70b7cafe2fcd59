"""Trains lines of the hundred scripts of 2026 as written, but for sizes and paths, on their numbers of ranks."""

from __future__ import annotations

import math
import shlex
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.runs import Recorder, make_parts
from tests.unit.config.commands import without
from tests.unit.config.test_hundred_scripts import scripts

PLACES = """--save --load --data-path --vocab-file --merge-file --tokenizer-model --tokenizer-type --data-cache-path
    --tensorboard-dir --split --distributed-backend --exit-interval --exit-duration-in-mins --save-interval
    --eval-interval --log-params-norm --log-num-zeros-in-grad --log-validation-ppl-to-tensorboard --mock-data
    --log-timers-to-tensorboard --log-memory-to-tensorboard --log-world-size-to-tensorboard
    --no-mmap-bin-files --lr-warmup-samples --lr-decay-samples --train-samples --save-retain-interval"""
SIZES = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 1 --global-batch-size 8 --train-iters 3 --lr 1e-2 --min-lr 1e-3 --vocab-size 97 --mock-data
    --num-workers 0 --eval-iters 0 --log-interval 1 --make-vocab-size-divisible-by 16 --attention-dropout 0
    --hidden-dropout 0 --device cpu --distributed-backend gloo"""
LAYOUT = """--tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size
    --expert-model-parallel-size --num-layers-per-virtual-pipeline-stage --sequence-parallel
    --expert-tensor-parallel-size --overlap-p2p-communication-warmup-flush"""
OF_SIZES = "--ffn-hidden-size --kv-channels --moe-ffn-hidden-size --lr-decay-iters --lr-warmup-fraction"


def small(number: int, *layout: str) -> list[str]:
    replaced = [word for word in f"{PLACES} {LAYOUT} {SIZES} {OF_SIZES}".split() if word.startswith("--")]
    kept = without(shlex.join(scripts()[number]), *replaced)
    return [*shlex.split(kept), *SIZES.split(), *layout]


def losses(argv: list[str], rank: int, ranks: int) -> list[float]:
    torch.set_num_threads(1)
    records: list[dict[str, Any]] = []
    _, parts = make_parts(argv, hooks=[Recorder(records)], rank=rank, world_size=ranks)
    with parts:
        parts.trainer.fit()
    return [record["lm_loss"] for record in records]


# what they are -> (line, its layout with 2 instead of 4 or 8, ranks)
KINDS = {
    "dense": (57, "--pipeline-model-parallel-size 2", 2),
    "divided optimizer": (27, "", 2),
    "weights gathered during the forward pass": (52, "--tensor-model-parallel-size 2", 4),
    "everything divided": (18, "--tensor-model-parallel-size 2", 4),
    "torch's fully_shard": (43, "", 2),
    "muon": (21, "", 2),
    "decoupled rates": (70, "--pipeline-model-parallel-size 2", 2),
    "experts": (23, "--expert-model-parallel-size 2", 2),
    "tensor and context": (74, "--tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel", 4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_trains_on_its_ranks_as_on_one(kind: str) -> None:
    number, layout, ranks = KINDS[kind]
    alone = losses(small(number), 0, 1)
    assert len(alone) == 3 and all(math.isfinite(loss) for loss in alone) and len(set(alone)) == 3
    for found in run_ranks(ranks, lambda rank: losses(small(number, *layout.split()), rank, ranks)):
        assert found == pytest.approx(alone, rel=1e-3)  # of bf16

"""The log of several ranks has the numbers of one process: loss, norms of gradients and weights, count of zeros. Copies
count once; rows that pad the vocabulary, of which tensor parallelism has more, do not count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.runs import flags, make_parts

# Without biases: that of the key has a gradient which is zero but for rounding, so how often it is exactly zero varies.
COMMON = {"hidden_dropout": 0, "attention_dropout": 0, "num_layers": 4, "disable_bias_linear": True}
COMMON["log_num_zeros_in_grad"] = True
UNTIED = {"untie_embeddings_and_output_weights": True, "num_query_groups": 1}
LAYOUTS = (
    {"tensor_model_parallel_size": 4, "sequence_parallel": True},
    {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    {"context_parallel_size": 2},
)


def logged(rank: int, ranks: int, cases: list[list[str]]) -> list[list[tuple[float, ...]]]:
    torch.set_num_threads(1)
    return [steps(rank, ranks, argv) for argv in cases]


def steps(rank: int, ranks: int, argv: list[str]) -> list[tuple[float, ...]]:
    _, parts = make_parts(argv, rank=rank, world_size=ranks, dtype=torch.float64)
    numbers = []
    with parts:
        for _ in range(3):
            result = parts.trainer.iterate()
            assert result is not None
            numbers.append(
                (
                    result.lm_loss,
                    result.grad_norm,
                    parts.engine.optimizer.params_norm().item(),
                    result.reported["num_zeros"],
                )
            )
    return numbers


@pytest.mark.parametrize("family", [{}, UNTIED], ids=["tied", "untied, one group"])
def test_every_layout_logs_what_one_process_logs(family: dict[str, Any]) -> None:
    alone = steps(0, 1, flags(**COMMON, **family))
    if family:
        assert alone[0][-1] > 0, "rows of the table that the batch does not use"
    cases = [flags(**COMMON, **family, **layout) for layout in LAYOUTS]
    for rank in run_ranks(4, logged, 4, cases):
        for numbers in rank:
            for ours, theirs in zip(numbers, alone, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-10, abs=0.0)

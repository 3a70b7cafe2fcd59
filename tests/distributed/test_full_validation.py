"""--full-validation reads every sample once in every layout, including those that do not fill a batch. Ranks that share
experts compute equally often; padding samples do not count."""

from __future__ import annotations

import pytest
import torch

from megatron.model.gpt import GPT
from megatron.parallelize.parallel import stage_fields
from megatron.training.batches import BatchMaker
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import flags, make_parts, pretrain_gpt

EXPERTS = {"num_experts": 4, "disable_bias_linear": True, "swiglu": True, "moe_ffn_hidden_size": 24}
SAMPLES = 7


def validated(rank: int, ranks: int, argv: list[str]) -> tuple[float, int]:
    torch.set_num_threads(1)
    run, parts = make_parts(argv, rank=rank, world_size=ranks, dtype=torch.float64)
    with parts:
        dataset = pretrain_gpt().datasets_provider(run, (SAMPLES, None, 0)).train
        assert len(dataset) == SAMPLES
        model, pp = parts.engine.model, run.parallel.pp
        fields = stage_fields(model, pp) if isinstance(model, GPT) and pp.size > 1 else None
        result = parts.engine.evaluate(BatchMaker(run, fields).once(dataset))
    return result.lm_loss, result.counted_tokens


@pytest.mark.parametrize("stages", [1, 2])
def test_experts_of_other_ranks(stages: int) -> None:
    """The first of two stages has no loss mask, but computes as often as the others."""
    argv = flags(**EXPERTS, hidden_dropout=0, attention_dropout=0)
    loss, tokens = validated(0, 1, argv)
    assert tokens == SAMPLES * 16
    argv += ["--expert-model-parallel-size", "2", "--pipeline-model-parallel-size", str(stages)]
    for ours, count in run_ranks(2 * stages, validated, 2 * stages, argv, timeout=40):
        assert abs(ours - loss) < 1e-10 * loss and count == tokens


@pytest.mark.parametrize("axis", ["context", "tensor_model", "pipeline_model"])
def test_samples_that_fill_no_batch_are_read_by_one_replica(axis: str) -> None:
    """Ranks of one replica read the same sample, over whichever axis they split it."""
    argv = flags(hidden_dropout=0, attention_dropout=0)
    loss, tokens = validated(0, 1, argv)
    for ours, count in run_ranks(4, validated, 4, [*argv, f"--{axis.replace('_', '-')}-parallel-size", "2"]):
        assert abs(ours - loss) < 1e-10 * loss and count == tokens == SAMPLES * 16

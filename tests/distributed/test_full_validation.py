"""--full-validation reads every sample once, also those that fill no batch, in every layout: where
ranks share experts all compute equally often, and the sample that fills up counts nothing."""

from __future__ import annotations

import torch

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
        result = parts.engine.evaluate(BatchMaker(run, 8).once(dataset))
    return result.lm_loss, result.counted_tokens


def test_experts_of_other_ranks() -> None:
    argv = flags(**EXPERTS, hidden_dropout=0, attention_dropout=0)
    loss, tokens = validated(0, 1, argv)
    assert tokens == SAMPLES * 16
    for ours, count in run_ranks(2, validated, 2, [*argv, "--expert-model-parallel-size", "2"], timeout=40):
        assert abs(ours - loss) < 1e-10 * loss and count == tokens

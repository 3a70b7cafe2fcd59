"""tools/check_layout.py --cluster: the flags of a user, proved in one process, and a launch that hangs found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config import parse_args
from megatron.pipeline_parallel.links import Links
from megatron.training.check_layout.cli import main
from megatron.training.order.prove import for_order
from tests.helpers.runs import flags

LAUNCH = flags(
    num_layers=8,
    hidden_size=256,
    num_attention_heads=8,
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=2,
    micro_batch_size=1,
    global_batch_size=256,
    bf16=True,
    weight_decay_incr_style="linear",
    start_weight_decay=0.0,
    end_weight_decay=0.1,
    rampup_batch_size=[64, 64, 512],
    train_iters=None,
    train_samples=4096,
    lr_warmup_samples=64,
    device="auto",
)


def test_what_the_classes_do_and_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert main(["--cluster", "64", "--", *LAUNCH]) == 0
    said = capsys.readouterr().out
    assert "tensor 2 x pipeline 2 x data 16 on 64 ranks" in said and "--num-layers 8 -> " in said
    assert "two runs: start, two steps, no evaluation (--eval-iters 0), save and stop; start, load of a " in said
    assert "first step of the classes of ranks 0, 1:" in said
    assert "  begins with pp gradient receive from stage 1, " in said and " x bfloat16" in said
    assert "PROVED for 64 ranks: " in said
    assert torch.get_num_threads() == threads and not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("more", "layers", "micro_batches"),
    [
        ({}, 8, 10),
        ({"use_distributed_optimizer": True}, 8, 10),
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, 16, 10),
        ({"num_layers_per_virtual_pipeline_stage": 2}, 16, 16),
        ({"pipeline_schedule": "zero-bubble"}, 16, 16),
    ],
)
def test_long_pipelines_are_cut_to_what_the_order_needs(
    more: dict[str, Any], layers: int, micro_batches: int, tmp_path: Path
) -> None:
    """Micro-batches that fill a schedule, alternate on every stage and empty it; of equal stages one layer, where
    nothing begins in one layer and ends in the next."""
    longer = {"num_layers": 32, "pipeline_model_parallel_size": 8, "train_iters": 2, "micro_batch_size": 1}
    given = parse_args(flags(**{**longer, "global_batch_size": 1024, **more}))
    config = for_order(given, 64, tmp_path)
    assert (config.model.num_layers, config.training.global_batch_size) == (layers, micro_batches * 8)


def test_a_launch_that_hangs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Links, "connect", lambda self, device: None)
    assert main(["--cluster", "64", "--", *LAUNCH]) == 1
    said = capsys.readouterr().out
    assert "rank 0 connects for receive from rank 32" in said and "WOULD HANG on 64 ranks: " in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--cluster", "64", "--steps", "2"], "--cluster 64: trains nothing, so --steps has no effect; remove it"),
        (["--cluster", "63"], "63 processes that were"),
        (["--cluster", "1"], "--cluster"),
    ],
)
def test_bad_input(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--", *LAUNCH]) == 2
    assert told in capsys.readouterr().err

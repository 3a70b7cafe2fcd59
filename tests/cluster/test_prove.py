"""tools/check_layout.py --cluster proves a user's flags in one process and finds a launch that hangs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from megatron.cli.check_layout import main
from megatron.config import parse_args
from megatron.errors import ConfigError, ConfigErrors, DataError
from megatron.pipeline_parallel.links import Links
from megatron.prove.order import record
from megatron.prove.order.cluster import record_runs
from megatron.prove.order.prove import for_order
from megatron.prove.order.record import waves
from tests.helpers.runs import flags, pretrain_gpt

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
EVERY_AXIS: dict[str, Any] = {
    "num_layers": 4,
    "tensor_model_parallel_size": 2,
    "context_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "overlap_grad_reduce": True,
    "micro_batch_size": 1,
    "global_batch_size": 16,
}


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
    """Keeps micro-batches that fill a schedule, alternate on every stage and drain it. Keeps one of several equal
    layers, unless work begins in one layer and ends in the next."""
    longer = {"num_layers": 32, "pipeline_model_parallel_size": 8, "train_iters": 2, "micro_batch_size": 1}
    given = parse_args(flags(**{**longer, "global_batch_size": 1024, **more}))
    config = for_order(given, 64, tmp_path)
    assert (config.model.num_layers, config.training.global_batch_size) == (layers, micro_batches * 8)


def test_a_launch_that_hangs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Links, "connect", lambda self, device: None)
    assert main(["--cluster", "64", "--", *LAUNCH]) == 1
    said = capsys.readouterr().out
    assert "rank 0 connects for receive from rank 32" in said and "WOULD HANG on 64 ranks: " in said


def test_files_that_nothing_is_read_from_need_not_be_there(capsys: pytest.CaptureFixture[str]) -> None:
    """The cluster's data need not be on the machine where its flags are proved."""
    argv = [word for word in LAUNCH if word != "--mock-data"]
    argv += ["--vocab-file", "/no/vocab.json", "--merge-file", "/no/merges.txt", "--data-path", "/no/documents"]
    assert main(["--cluster", "64", "--", *argv]) == 0
    assert "PROVED for 64 ranks: " in capsys.readouterr().out


def test_workers_record_what_one_process_records(tmp_path: Path) -> None:
    """Every group of ranks has what those before it broadcast, whichever worker recorded them."""
    longer = {**EVERY_AXIS, "train_iters": 2, "eval_iters": 1, "eval_interval": 2, "save": "?", "save_interval": 1}
    config = for_order(parse_args(flags(**longer)), 16, tmp_path)
    found = {}
    for workers in (1, 3):
        folder, report = tmp_path / str(workers), Mock()
        folder.mkdir()
        found[workers] = record_runs(config, 16, pretrain_gpt(), folder, workers=workers, report=report)
        assert report.call_count == 2 * (8 + 3)
    assert found[1] == found[3]
    assert {name: run.findings() for name, run in found[3].items()} == {"a new run": [], "a resumed run": []}


def test_what_is_known_of_the_groups_before() -> None:
    layout = parse_args(flags(**EVERY_AXIS)).parallel.layout(16)
    first, stages, rest = waves(layout, range(16))
    assert (first, stages) == ({(0, 1): None}, {(8, 9): 0})
    assert rest == {(2, 3): 0, (4, 5): 0, (6, 7): 0, (10, 11): 8, (12, 13): 8, (14, 15): 8}


def test_an_error_and_a_death_in_a_worker(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--traceback", "--workers", "2", "--cluster", "64", "--", *LAUNCH]
    several = ConfigErrors([ConfigError("no such thing"), ConfigError("nor another")])
    for error, code, said in (
        (DataError("no such thing"), DataError.exit_code, "check_layout.py: no such thing\n"),
        (several, 2, "check_layout.py: no such thing\ncheck_layout.py: nor another\n"),
        (KeyError("thing"), 2, "; --traceback shows the calls\n"),
    ):
        monkeypatch.setattr(record, "held_save_directory", Mock(side_effect=error))
        assert main(command) == code
        told = capsys.readouterr().err
        assert told.endswith(said) and "in _record_rank" in told, "the calls that led there are those of the worker"
    monkeypatch.setattr(record, "held_save_directory", lambda run: os._exit(9))
    assert main(command) == 2
    assert "the process that recorded ranks (0, 1) died (exit code 9); if memory ran out, lower --workers " in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--workers", "2"], "--workers 2: has no effect without --cluster N; remove --workers"),
        (["--cluster", "64", "--steps", "2"], "--cluster 64: trains nothing, so --steps has no effect; remove --steps"),
        (["--cluster", "63"], "the number of processes, 63, is not divisible by"),
        (["--cluster", "1"], "--cluster"),
    ],
)
def test_bad_input(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--", *LAUNCH]) == 2
    assert told in capsys.readouterr().err

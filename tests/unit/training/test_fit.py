"""The verdict of --dry-run on memory: the limit, and the flags that save most, each with what it saves."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.config import parse_args
from megatron.distributed.launch import LaunchInfo
from megatron.distributed.parallel_state import ParallelState
from megatron.training import fit
from megatron.training.memory import predicted
from megatron.utils.device import human_bytes, total_memory
from tests.helpers.runs import flags, make_run, pretrain_gpt, pretrain_here

UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
SHAPE = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "global_batch_size": 16, "micro_batch_size": 4}


def rows(capsys: pytest.CaptureFixture[str], ranks: int = 4, **settings: Any) -> list[tuple[str, str]]:
    assert pretrain_here(flags(**{**SHAPE, **settings}, dry_run=True, dry_run_ranks=ranks)) == 0
    plan = capsys.readouterr().out.partition("dry run: ")[2].splitlines()
    found = [re.match(r"  (\w[\w ]*?)  +(.*)", line) for line in plan]
    return [(match[1], match[2]) for match in found if match]


def bytes_of(text: str) -> float:
    number, unit = text.split()[:2]
    return float(number) * UNITS[unit]


@pytest.mark.parametrize("settings", [{}, {"bf16": True, "zero_stage": 1}, {"tensor_model_parallel_size": 2}])
def test_each_change_saves_what_it_promises(settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The command with the change is planned anew: its memory is the old one less what was promised."""
    planned = rows(capsys, device_memory="1GB", **settings)
    total = bytes_of(dict(planned)["total memory"])
    saving = [text.split(" with ") for name, text in planned if name == "saves memory"]
    assert len(saving) == 3
    amounts = [bytes_of(amount) for amount, _ in saving]
    assert amounts == sorted(amounts, reverse=True)
    for amount, words in saving:
        changed = {**SHAPE, **settings, "dry_run": True, "dry_run_ranks": 4, "device_memory": "1GB"}
        for name in ("micro_batch_size", "tensor_model_parallel_size", "zero_stage"):
            if f"--{name.replace('_', '-')} " in words:
                changed.pop(name, None)
        assert pretrain_here([*flags(**changed), *words.split()]) == 0
        after = re.search(r"total memory +(.*)", capsys.readouterr().out)
        assert after and bytes_of(after[1]) == pytest.approx(total - bytes_of(amount), rel=0.02)


def test_no_other_candidate_saves_more(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_args(flags(**SHAPE, device_memory="1GB", dry_run=True))
    run = replace(make_run(config), launch=LaunchInfo(world_size=4, local_world_size=4))
    run = replace(run, parallel=ParallelState.plan(config.parallel.layout(4), 0))
    model, ranks = pretrain_gpt().model_provider(run), range(4)
    now = max(rank.total for rank in predicted(run, model, ranks))
    saved = {words: now - max(rank.total for rank in predicted(it, model, ranks)) for words, it in fit._changes(run)}
    assert {"--bf16", "--zero-stage 3", "--optimizer-cpu-offload", "--micro-batch-size 2"} <= saved.keys()
    assert saved["--sequence-parallel"] == 0  # no effect without tensor parallelism
    best = sorted(saved, key=lambda words: -saved[words])[:3]
    shown = [text.partition(" with ")[2] for name, text in fit.plan_rows(run, model) if name == "saves memory"]
    assert shown == best
    capsys.readouterr()


@pytest.mark.parametrize("axes", [{}, {"pipeline_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}])
def test_ranks_of_one_machine_share_its_memory(
    axes: dict[str, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank per stage is computed; the sum is over all ranks."""
    config = parse_args(flags(**SHAPE, **axes, dry_run=True))
    run = replace(
        make_run(parse_args(flags(**SHAPE))), config=config, launch=LaunchInfo(world_size=4, local_world_size=4)
    )
    run = replace(run, parallel=ParallelState.plan(config.parallel.layout(4), 0))
    model = pretrain_gpt().model_provider(run)
    together = sum(rank.total for rank in predicted(run, model, range(4)))
    monkeypatch.setattr(fit, "memory_limit", lambda: 10**12)
    shown = dict(fit.plan_rows(run, model))["total memory"]
    assert shown.startswith(f"{human_bytes(together)} for the ranks together")
    capsys.readouterr()


@pytest.mark.parametrize(("tp", "offered"), [(4, True), (8, False)])
def test_tensor_ranks_stay_on_one_machine(tp: int, offered: bool) -> None:
    config = parse_args(flags(**SHAPE, dry_run=True))
    words = [
        words
        for words, *_ in fit._layouts(replace(config, parallel=replace(config.parallel, tensor_model_parallel_size=tp)))
    ]
    assert (f"--tensor-model-parallel-size {2 * tp}" in words) == offered


@pytest.mark.parametrize(
    ("share", "verdict"), [(1.2, "fits into"), (1.05, "may not fit into"), (0.99, "does not fit into")]
)
def test_a_bound_that_counts_no_temporary_tensors_needs_a_margin(
    share: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(parse_args(flags(**SHAPE)))
    model = pretrain_gpt().model_provider(run)
    need = sum(rank.total for rank in predicted(run, model, [0]))
    monkeypatch.setattr(fit, "memory_limit", lambda: round(need * share))
    assert f": {verdict} the " in dict(fit.plan_rows(run, model))["total memory"]


def test_an_accelerator_is_compared_with_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a device: the rank that needs most counts, and not the sum."""
    asked: list[torch.device] = []
    monkeypatch.setattr(fit, "total_memory", lambda device: (asked.append(device), 10**12)[1])
    run = replace(make_run(parse_args(flags(**SHAPE))), device=torch.device("cuda", 1))
    line = dict(fit.plan_rows(run, pretrain_gpt().model_provider(run)))["total memory"]
    assert asked == [torch.device("cuda", 1)]
    assert "for the rank that needs most (estimate): fits into the" in line and line.endswith("of this device")


def test_the_memory_of_a_device_is_that_of_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 85_899_345_920

    class Module:
        @staticmethod
        def get_device_properties(device: torch.device) -> Properties:
            return Properties()

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    assert total_memory(torch.device("cuda")) == 85_899_345_920
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())  # a plug-in that does not report it
    assert total_memory(torch.device("cuda")) is None


@pytest.mark.parametrize(("limit", "verdict"), [("100MB", "fits"), ("1MB", "does not fit")])
def test_a_limit_is_compared(limit: str, verdict: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = dict(rows(capsys, device_memory=limit))["total memory"]
    assert f"for the rank that needs most (estimate): {verdict} into the " in line and line.endswith(
        f"--device-memory {limit}"
    )


@pytest.mark.parametrize("size", ["80GB", "80B", "80000000000", "80", "80X", "GB", "0GB", "1.5GB", "8 iB"])
def test_a_size_is_read(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    fine = size in ("80GB", "80B", "80000000000")
    assert pretrain_here(flags(dry_run=True, device_memory=size)) == (0 if fine else 2)
    why = "a size without a unit; give a unit, such as 80GB" if size == "80" else "not a size; give a size such as 80GB"
    said = capsys.readouterr().err
    assert f"--device-memory {size}: {why}" in said or fine


def test_the_plan_names_the_device_whose_memory_it_counts(capsys: pytest.CaptureFixture[str]) -> None:
    for size, said in (("80GB", "; memory is planned for an accelerator of 80GB in each rank\n"), (None, "")):
        given = {} if size is None else {"device_memory": size}
        assert pretrain_here(flags(dry_run=True, **given)) == 0
        shown = capsys.readouterr().out
        assert f"data parallel 1{said}" in shown and ("accelerator of" in shown) == bool(said)
        assert "on the rank with most (estimate, without temporary tensors)" in shown  # a lower bound: not "at most"

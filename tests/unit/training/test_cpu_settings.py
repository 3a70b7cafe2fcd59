"""Settings that a run makes for its CPU, and those that it leaves."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from megatron.config import parse_args
from megatron.distributed.launch import LaunchInfo
from megatron.errors import ConfigError
from megatron.training import devices, initialize
from megatron.utils.log import RankLog

MODEL = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8"
RUN = f"{MODEL} --micro-batch-size 1 --mock-data --vocab-size 16 --train-iters 1 --lr 1e-3"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Records the settings that a run asks for, without making them."""
    calls: list[str] = []
    for name in ("set_allocator", "set_fp32_products", "set_scheduling"):
        monkeypatch.setattr(devices, name, lambda choice, *_, name=name: calls.append(f"{name} {choice}") or name)
    monkeypatch.setattr(devices, "pin", lambda launch: calls.append("pin") or frozenset({0, 1}))
    threads = torch.get_num_threads()
    yield calls
    torch.set_num_threads(threads)


def prepare(flags: str, device: str) -> int:
    config = parse_args([*RUN.split(), *flags.split()])
    return devices.prepare_cpu(config, LaunchInfo(), torch.device(device), RankLog())


def test_on_a_cpu_every_setting_is_made_and_said(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare("--cpu-threads 1 --cpu-pinning", "cpu") == torch.get_num_threads() == 1
    assert asked == ["set_allocator auto", "set_fp32_products auto", "pin", "set_scheduling auto"]
    assert capsys.readouterr().out.splitlines() == [
        "set_allocator",
        "set_fp32_products",
        "each rank stays on its own cores; rank 0 on 0, 1",
        "set_scheduling",
    ]


def test_beside_an_accelerator_only_what_was_asked_for(asked: list[str]) -> None:
    prepare("", "meta")
    assert asked == []
    prepare("--cpu-allocator keep --fp32-products mkl --cpu-scheduling batch", "meta")
    assert asked == ["set_allocator keep", "set_fp32_products mkl", "set_scheduling batch"]


def test_half_precision_is_multiplied_the_fast_way_and_a_line_says_how(
    monkeypatch: pytest.MonkeyPatch, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "set_half_products", lambda dtype: f"how {dtype} is multiplied")
    for flags, device, expected in (
        ("--fp16", "cpu", ["torch.float16"]),
        ("--bf16", "cpu", ["torch.bfloat16"]),
        ("", "cpu", []),
        ("--fp16", "meta", []),
        ("--bf16", "meta", []),
    ):
        prepare(flags, device)
        assert re.findall("how (.*) is multiplied", capsys.readouterr().out) == expected


def test_the_settings_come_before_anything_large(monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    def tokenizer_of(*_: object, **__: object) -> None:
        assert asked, "the tokenizer was built before the allocator was set"
        raise ConfigError("far enough")

    monkeypatch.setattr(initialize, "tokenizer_of", tokenizer_of)
    with pytest.raises(ConfigError, match="far enough"):
        initialize.start(parse_args(RUN.split()))

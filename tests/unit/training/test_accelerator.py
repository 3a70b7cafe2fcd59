"""Settings that a run makes before it uses its accelerator, tested without one."""

from __future__ import annotations

import io
import os
from dataclasses import replace

import pytest
import torch

from megatron.distributed.launch import LaunchInfo
from megatron.training import devices as module
from megatron.training.settings import read_settings
from megatron.utils import cuda
from megatron.utils.log import RankLog
from tests.helpers.runs import flags

CUDA = torch.device("cuda", 1)


def prepared(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, *, grows: bool, **settings: bool
) -> tuple[str, list]:
    """(output, calls in order)."""
    calls: list[object] = []
    monkeypatch.setattr(module, "activate", calls.append)
    monkeypatch.setattr(module, "grow_segments", lambda given: calls.append("grow") or grows)
    config, stream = read_settings(flags()), io.StringIO()
    config = replace(
        config,
        training=replace(config.training, deterministic_mode=settings.get("deterministic", False)),
        precision=replace(config.precision, allow_tf32=settings.get("tf32", False)),
        runtime=replace(config.runtime, dry_run=settings.get("dry_run", False)),
    )
    module.prepare_accelerator(config, device, RankLog(0, stream))
    return stream.getvalue(), calls


def test_the_device_is_chosen_before_kernels_are_tried_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepared(monkeypatch, CUDA, grows=True) == ("", [CUDA, "grow"])
    assert prepared(monkeypatch, torch.device("cpu"), grows=True) == ("", [])
    assert prepared(monkeypatch, CUDA, grows=True, dry_run=True) == ("", [])


def test_segments_that_do_not_grow_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said, _ = prepared(monkeypatch, CUDA, grows=False)
    assert said.count("expandable segments") == 1 and said.count("\n") == 1


def test_deterministic_products_have_their_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    prepared(monkeypatch, CUDA, grows=True)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    prepared(monkeypatch, CUDA, grows=True, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    prepared(monkeypatch, CUDA, grows=True, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_products_are_rounded_to_tf32_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    products = torch.backends.cuda.matmul
    for asked in (True, False):  # ends as a process begins
        assert prepared(monkeypatch, CUDA, grows=True, tf32=asked)[0] == ""
        assert products.allow_tf32 is asked
    said, _ = prepared(monkeypatch, torch.device("cpu"), grows=True, tf32=True)
    assert said.strip() == "--allow-tf32: has no effect, because the device cpu has no TF32 products"
    assert products.allow_tf32 is False


def refuses(settings: str) -> None:
    raise RuntimeError("expandable_segments not supported on this platform")


@pytest.mark.parametrize("refusal", ["raises", "has no such call"])
def test_a_torch_without_growing_segments(monkeypatch: pytest.MonkeyPatch, refusal: str) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append, raising=False)
    assert cuda.grow_segments() and asked == ["expandable_segments:True"]
    if refusal == "raises":
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuses)
    else:
        monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
        monkeypatch.delattr(torch.cuda.memory, "_set_allocator_settings")
    assert not cuda.grow_segments()


@pytest.mark.parametrize(
    ("variable", "given", "asked"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128", ["max_split_size_mb:128,expandable_segments:True"]),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False", []),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", []),
    ],
)
def test_what_the_user_has_set_of_the_allocator_stays(
    monkeypatch: pytest.MonkeyPatch, variable: str, given: str, asked: list[str]
) -> None:
    """torch applies each call to all allocators, and forgets some earlier settings."""
    found: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append, raising=False)
    monkeypatch.setattr(module, "activate", lambda device: None)
    launch = LaunchInfo.detect(env={variable: given})
    module.prepare_accelerator(read_settings(flags()), CUDA, RankLog(0), launch.allocator)
    assert found == asked

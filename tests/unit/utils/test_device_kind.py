"""Code asks for abilities of devices and does not compare the names of their kinds."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from megatron.engine.assembly import runs_ahead
from megatron.ops.library import library
from megatron.ops.operation import Target
from megatron.ops.select import why_not_native
from megatron.optimizer.norms import widest
from megatron.utils import device_kind
from megatron.utils.device import accelerator_memory
from megatron.utils.device_kind import KINDS, DeviceKind, kind_of
from tests.policy.measure import ROOT, comparisons_with, sources

LEFT = 5
"""Remaining comparisons: the record of a GPU, a CUDA-only capability, and choices inside a compiled graph."""


def test_few_comparisons_with_the_name_of_a_kind_are_left() -> None:
    assert comparisons_with("cuda", sources(ROOT)) <= LEFT


def test_a_kind_that_is_not_listed_can_do_nothing_special() -> None:
    assert not any(getattr(kind_of("npu"), field.name) for field in fields(DeviceKind))
    device = torch.device("meta")  # a kind that torch knows and we do not
    assert accelerator_memory(device) == {} and widest(device) == torch.float32 and not runs_ahead(device)
    assert why_not_native(library(), "meta") in ("not made for the device meta", library().missing)


def test_an_accelerator_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_kind, "KINDS", {**KINDS, "meta": DeviceKind(asynchronous=True, double=True)})
    assert runs_ahead(torch.device("meta")) and widest(torch.device("meta")) == torch.float64
    assert not Target("meta").kind.cuda_libraries

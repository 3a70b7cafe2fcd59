"""Buffers of every dtype in half precision. The reference Llama's rotation, whose factors are complex, computes what
plain torch computes; all dtypes come back from a checkpoint."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.compat.any_model import initialize
from megatron.errors import ConfigError
from megatron.training.model import _provided
from tests.helpers.distributed import run_ranks

STAGES = (0, 1, 2, 3)
CAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
FLOATS = ("wide", "eighths")
"""Floating-point buffers of all widths become the model's dtype, as with DeepSpeed's module.bfloat16()."""


def frequencies(dim: int, end: int, theta: float = 10000.0) -> Tensor:
    """precompute_freqs_cis of the reference Llama."""
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: dim // 2].float() / dim))
    freqs = torch.outer(torch.arange(end), freqs).float()
    return torch.polar(torch.ones_like(freqs), freqs)


class Rotated(nn.Module):
    freqs_cis: Tensor
    back: Tensor
    not_saved: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.register_buffer("freqs_cis", frequencies(8, 4))
        self.register_buffer("back", self.freqs_cis.conj())
        self.register_buffer("not_saved", frequencies(8, 4).to(torch.complex128), persistent=False)
        self.register_buffer("wide", torch.tensor(math.pi, dtype=torch.float64))
        self.register_buffer("eighths", torch.tensor([0.5, 1.5]).to(torch.float8_e4m3fn))
        self.register_buffer("small", torch.tensor([-3, 5], dtype=torch.int16))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * self.freqs_cis  # [1, 4, 4]
            turned = turned * self.back * self.not_saved * self.freqs_cis
            x = torch.view_as_real(turned).flatten(-2).type_as(x)
        return x


def computed(rank: int, size: int, folder: str) -> list[str]:
    """Lists differences from plain torch."""
    wrong = []
    for half, dtype in CAST.items():
        for stage in STAGES:
            model, plain = Rotated(), Rotated()
            plain.layers.to(dtype)
            config: dict[str, Any] = {"train_batch_size": size, half: {"enabled": True}}
            config["zero_optimization"] = {"stage": stage}
            if rank:
                model.freqs_cis.zero_()  # taken from the first rank
            engine, *_ = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
            x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(1))
            same = [torch.equal(engine(x), plain(x.to(dtype)))]
            engine.backward(engine(x).float().square().mean())
            engine.step()
            engine.save_checkpoint(f"{folder}/{half}{stage}")
            for buffer in model.buffers():
                buffer.copy_(torch.zeros_like(buffer))
            engine.load_checkpoint(f"{folder}/{half}{stage}")
            found = {**engine.whole_state_dict(), "not_saved": plain.not_saved}
            for name, buffer in plain.named_buffers():
                same.append(torch.equal(found[name], buffer.to(dtype) if name in FLOATS else buffer))
            if not all(same):
                wrong.append(f"{half}, stage {stage}: {same}")
    return wrong


def test_complex_and_other_buffers_in_one_process(tmp_path: Path) -> None:
    assert computed(0, 1, str(tmp_path)) == []


def test_complex_and_other_buffers_on_two_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, computed, 2, str(tmp_path)) == [[], []]


def test_planted_bug_complex_numbers_are_cast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("megatron.compat.any_model.initialize")
    monkeypatch.setattr(module, "cast_floats", lambda model, dtype: model.to(dtype))
    monkeypatch.setattr(f"{__name__}.STAGES", (1,))
    with pytest.raises(AssertionError):
        test_complex_and_other_buffers_in_one_process(tmp_path)


def test_the_model_of_a_provider_keeps_its_complex_buffers() -> None:
    run: Any = SimpleNamespace(dtype=torch.bfloat16)
    model = _provided(run, lambda run: Rotated(), torch.device("cpu"))
    assert torch.equal(model.get_buffer("freqs_cis"), frequencies(8, 4))
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    model.phases = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ConfigError, match="the model provider's model: phases is complex"):
        _provided(run, lambda run: model, torch.device("cpu"))

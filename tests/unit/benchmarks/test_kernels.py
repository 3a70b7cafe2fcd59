"""The benchmark of kernels runs every case; a failing case does not end it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import kernels
from benchmarks.parts import expert_rows
from benchmarks.parts import grown as module
from megatron.ops.proof import flat_tensors
from tests.helpers.kernels import backend

OF_EXPERTS = ("taken", "weighted_sum")


def small(value: Any) -> Any:
    """Shrinks a case to a few rows and numbers."""
    if not isinstance(value, torch.Tensor):
        return value
    for dim, size in enumerate(value.shape):
        if dim < value.dim() - 1 or (value.dim() == 1 and size > 4096):
            value = value.narrow(dim, 0, min(size, 8 if value.dim() > 1 else 4000))
    return value.contiguous()


@pytest.mark.parametrize(
    "case",
    [
        *(c for c in kernels.CASES if c.op not in (*OF_EXPERTS, "rope", "adamw", "grad_norm", "packed_attention")),
        kernels.packed_attention_case(2, 2, 8, 4),
    ],
    ids=lambda c: c.op,
)
def test_the_contenders_of_a_case_compute_the_same(case: kernels.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "randn", lambda *shape, dtype, device: torch.randn(*(min(s, 256) for s in shape)))
    args = [small(arg) for arg in case.inputs(torch.float32, "cpu")]
    if case.op == "cross_entropy":
        args[1] = args[1][: len(args[0])] % args[0].shape[1]
    assert_alike(case, args)


def assert_alike(case: kernels.Case, args: Sequence[Any]) -> None:
    ops = backend("cpu").ops
    results = [flat_tensors(function(*args)) for function in (case.ours(ops), case.eager, case.formula)]
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", [c for c in kernels.CASES if c.op in OF_EXPERTS], ids=lambda c: c.op)
def test_the_contenders_move_the_same_rows_of_experts(case: kernels.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_rows, "TOKENS", 16)
    expert_rows.order_of_experts.cache_clear()
    assert_alike(case, case.inputs(torch.float32, "cpu"))
    expert_rows.order_of_experts.cache_clear()


def test_a_gpu_is_given_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ELEMENTS", 12 * 5)
    x, labels, weight, angles = torch.rand(4, 3), torch.arange(4), torch.rand(4), torch.rand(1, 4, 1, 2)
    larger = module.grown((x, labels, weight, angles, True))
    assert larger[0].shape == (20, 3) and torch.equal(larger[0][4:8], x) and torch.equal(larger[1], labels.repeat(5))
    assert larger[2] is weight and larger[3] is angles and larger[4] is True
    assert module.grown((weight, x)) == (weight, x), "buffers of the optimizer are large"


def test_what_fails_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend("cpu")

    def fails(*args: Any) -> Any:
        raise RuntimeError("CUDA error 700\nand more")

    (case,) = [case for case in kernels.CASES if case.op == "swiglu"]
    monkeypatch.setattr(kernels, "CASES", (replace(case, ours=lambda ops: fails), case))
    out = tmp_path / "times.json"
    kernels.main(["--dtype", "bf16", "--rounds", "1", "--warmup", "0", "--only", "ours", "eager", "--json", str(out)])
    broken, right = json.loads(out.read_text())["results"]
    assert broken["failed"]["ours"].startswith("RuntimeError: CUDA error 700") and set(broken["ms"]) == {"eager"}
    assert not right["failed"] and set(right["ms"]) == {"ours", "eager"}
    assert "ours FAILED: RuntimeError: CUDA error 700" in kernels.line(broken)


def test_the_time_is_kept_and_attention_is_the_cpus_alone(capsys: pytest.CaptureFixture[str]) -> None:
    backend("cpu")
    words = ["--op", "rms_norm", "--rounds", "1", "--warmup", "0", "--only", "ours", "--seconds", "0"]
    assert len(kernels.main(words)) <= 1
    assert [case.op for case in kernels.CASES if not case.runs_on("cuda")] == [*["attention"] * 4, "packed_attention"]

"""The verdict on one kernel: every call of its proof, against fp64."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.ops.proof.compare import Draw, Proof, check, flat_tensors

SMALL = 20_000  # elements: what compute-sanitizer, and a run that begins, do in seconds


@dataclass(frozen=True)
class Verdict:
    """The result for one operation in one dtype: the largest error, that of its CPU twin, and what was wrong."""

    op: str
    folder: str
    dtype: str
    tensors: int
    error: float
    error_of_twin: float
    wrong: tuple[str, ...]

    def line(self) -> str:
        return (
            f"{self.op:<24} {self.dtype:<9} {self.tensors:4} tensors  error {self.error:.2e}  "
            f"CPU {self.error_of_twin:.2e}  {'; '.join(self.wrong[:3]) or 'right'}"
        )


def elements(args: Iterable[Any]) -> int:
    return sum(tensor.numel() for tensor in flat_tensors(list(args)))


def judge(
    proof: Proof, dtype: torch.dtype, seed: int, where: tuple[Any, str], twin: Any, largest: int | None = None
) -> Verdict:
    """`where`: torch.ops.<namespace> and the device; `twin`: the operations of the CPU, or None."""
    errors, twin_errors, wrong = [0.0], [0.0], []
    for call in proof.calls(Draw(dtype, torch.Generator().manual_seed(seed))):
        if largest is not None and elements(call.args) > largest:
            continue
        try:
            findings = check(proof, call, *where)
        except Exception as error:  # a launch that failed, an argument that was changed, an output of a wrong shape
            wrong.append(f"{call.name}: {(str(error).splitlines() or [type(error).__name__])[0]}")
            continue
        errors += [finding.error for finding in findings]
        wrong += [f"{call.name}: {finding.tensor}: {finding.wrong}" for finding in findings if finding.wrong]
        if twin is not None:
            twin_errors += [finding.error for finding in check(proof, call, twin, "cpu")]
    name = str(dtype).removeprefix("torch.")
    return Verdict(proof.name, proof.folder, name, len(errors) - 1, max(errors), max(twin_errors), tuple(wrong))

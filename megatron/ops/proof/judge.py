"""The verdict on one kernel, from comparing every call of its proof with fp64."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.ops.operation import kernel_name
from megatron.ops.proof.compare import Draw, Proof, compare_call, flat_tensors
from megatron.ops.registry import kernels_in

SMALL = 20_000  # elements of a call that compute-sanitizer, or a starting run, finishes in seconds


@dataclass(frozen=True)
class OperationReport:
    """Result for one operation in one dtype: its largest error, the largest error of the CPU's kernel, and all
    failures."""

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


def doubts(folder: str, proofs: Iterable[Proof], verdicts: Iterable[OperationReport]) -> dict[str, str]:
    """Returns the kernels of a folder (`kernel_name`) that are wrong or were not judged, with the reason. An operation
    with several proofs needs all of them. A verdict without a dtype holds the reason why its process failed."""
    found = {(verdict.op, verdict.dtype): verdict for verdict in verdicts if verdict.folder == folder}
    missing = next((verdict.wrong[0] for verdict in found.values() if not verdict.dtype), "it has no proof")
    of_kernel: dict[str, list[OperationReport | None]] = {name: [] for name in kernels_in(folder)}
    for proof in proofs:
        for dtype in proof.dtypes if proof.folder == folder else ():
            verdict = found.get((proof.name, str(dtype).removeprefix("torch.")))
            of_kernel[kernel_name(proof.operation or proof.name, dtype)].append(verdict)
    return {name: why for name, own in of_kernel.items() if (why := _doubt(own, missing)) is not None}


def _doubt(verdicts: Sequence[OperationReport | None], missing: str) -> str | None:
    judged = [verdict for verdict in verdicts if verdict is not None]
    wrong = [f"{verdict.op} {verdict.dtype}: {text}" for verdict in judged for text in verdict.wrong]
    if wrong:
        return wrong[0]
    return None if judged and len(judged) == len(verdicts) else missing


def elements(args: Iterable[Any]) -> int:
    return sum(tensor.numel() for tensor in flat_tensors(list(args)))


def judge(
    proof: Proof, dtype: torch.dtype, seed: int, where: tuple[Any, str], twin: Any, largest: int | None = None
) -> OperationReport:
    """Judges one kernel. `where`: torch.ops.<namespace> and the device. `twin`: the CPU's operations, or None."""
    errors, twin_errors, wrong = [0.0], [0.0], []
    for call in proof.calls(Draw(dtype, torch.Generator().manual_seed(seed))):
        if largest is not None and elements(call.args) > largest:
            continue
        try:
            findings = compare_call(proof, call, *where)
        except Exception as error:  # a failed launch, a changed argument, an output of a wrong shape
            wrong.append(f"{call.name}: {(str(error).splitlines() or [type(error).__name__])[0]}")
            continue
        errors += [finding.error for finding in findings]
        wrong += [f"{call.name}: {finding.tensor}: {finding.wrong}" for finding in findings if finding.wrong]
        if twin is not None:
            twin_errors += [finding.error for finding in compare_call(proof, call, twin, "cpu")]
    name = str(dtype).removeprefix("torch.")
    return OperationReport(proof.name, proof.folder, name, len(errors) - 1, max(errors), max(twin_errors), tuple(wrong))

"""What every kernel of csrc/ is checked on: one table for the tests and for tools/gpu_check.py.

An operation is checked everywhere (CPU, emulated CUDA, a GPU) as soon as its Subject stands here; what is built for the
CPU alone is in a table of its own.
"""

from __future__ import annotations

from megatron.ops.proof import activation, attention, cross_entropy, norm, optim, rope, softmax
from megatron.ops.proof.subject import Call, Draw, Finding, Subject, check, flat_tensors

_MODULES = (activation, cross_entropy, norm, optim, rope, softmax)
SUBJECTS: dict[str, Subject] = {subject.name: subject for module in _MODULES for subject in module.SUBJECTS}
CPU_SUBJECTS: dict[str, Subject] = {subject.name: subject for subject in attention.SUBJECTS}

__all__ = ["CPU_SUBJECTS", "SUBJECTS", "Call", "Draw", "Finding", "Subject", "check", "flat_tensors"]

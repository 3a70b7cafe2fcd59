"""What every kernel of csrc/ is checked on: one table for the tests and for tools/gpu_check.py.

An operation is checked everywhere (CPU, emulated CUDA, a GPU) as soon as its Subject stands here.
"""

from __future__ import annotations

from megatron.ops.proof import activation, cross_entropy, norm, optim, rope, softmax
from megatron.ops.proof.subject import Call, Draw, Finding, Subject, check, flat_tensors

_MODULES = (activation, cross_entropy, norm, optim, rope, softmax)
SUBJECTS: dict[str, Subject] = {subject.name: subject for module in _MODULES for subject in module.SUBJECTS}

__all__ = ["SUBJECTS", "Call", "Draw", "Finding", "Subject", "check", "flat_tensors"]

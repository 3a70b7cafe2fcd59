"""Verification of every kernel of csrc/: inputs, an oracle in fp64, and tolerances.

This package is loaded only for verification (a first run on a GPU, tools/gpu_check.py, the tests). It collects PROOFS
from all modules in its folder. A kernel with a proof is verified on every backend: CPU, emulated CUDA, GPU.
"""

from importlib import import_module
from pathlib import Path

from megatron.ops.proof.compare import Call, Draw, Finding, Proof, compare_call, flat_tensors
from megatron.ops.proof.judge import SMALL, OperationReport, doubts, judge

_NAMES = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
_MODULES = [module for name in _NAMES if hasattr(module := import_module(f"{__name__}.{name}"), "PROOFS")]
PROOFS: dict[str, Proof] = {proof.name: proof for module in _MODULES for proof in module.PROOFS}

"""How every kernel of csrc/ is verified on a machine: inputs, an oracle in fp64, tolerances.

Loaded only where something is verified (a first run on a GPU, tools/gpu_check.py, the tests). Every module here that
defines PROOFS is found by its file; a kernel is verified on each backend (CPU, emulated CUDA, a GPU) as soon as its
proof is there.
"""

from importlib import import_module
from pathlib import Path

from megatron.ops.proof.compare import Call, Draw, Finding, Proof, compare_call, flat_tensors
from megatron.ops.proof.judge import SMALL, OperationReport, doubts, judge

_NAMES = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
_MODULES = [module for name in _NAMES if hasattr(module := import_module(f"{__name__}.{name}"), "PROOFS")]
PROOFS: dict[str, Proof] = {proof.name: proof for module in _MODULES for proof in module.PROOFS}

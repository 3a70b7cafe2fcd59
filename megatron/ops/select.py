"""One switch decides which implementation of every operation runs: `--kernels auto|native|ref[,-op...]`.

Resolved once, handed to constructors, printed as a table. It never changes the function that is computed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from megatron.errors import ConfigError
from megatron.ops import builtin, cpu_attention, grouped_linear, ref
from megatron.ops.linear_cross_entropy import linear_cross_entropy


@dataclass(frozen=True)
class Choice:
    op: str
    backend: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The operations a model is built from. Signatures and meaning: megatron/ops/ref.py."""

    layer_norm: Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    gelu: Callable[[Tensor, bool], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    squared_relu: Callable[[Tensor], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    bias_dropout_add: Callable[[Tensor, Tensor | None, Tensor, Callable[[Tensor], Tensor]], Tensor]
    softmax: Callable[[Tensor, Tensor | None, float], Tensor]
    attention: Callable[..., Tensor]
    cross_entropy: Callable[[Tensor, Tensor], Tensor]
    linear_cross_entropy: Callable[..., Tensor]
    grouped_linear: Callable[..., Tensor]
    choices: tuple[Choice, ...] = field(default=(), compare=False)

    def table(self) -> str:
        """One line per operation: name, backend, reason."""
        rows = [("op", "backend", "reason"), *((c.op, c.backend, c.reason) for c in self.choices)]
        op_width, backend_width = (max(len(row[column]) for row in rows) for column in (0, 1))
        return "\n".join(f"{op:<{op_width}}  {backend:<{backend_width}}  {why}" for op, backend, why in rows)


_REF: dict[str, Callable[..., Any]] = {
    "layer_norm": ref.layer_norm,
    "rms_norm": ref.rms_norm,
    "gelu": ref.gelu,
    "swiglu": ref.swiglu,
    "squared_relu": ref.squared_relu,
    "rope": ref.rope,
    "bias_dropout_add": ref.bias_dropout_add,
    "softmax": ref.softmax,
    "attention": ref.attention,
    "cross_entropy": ref.cross_entropy,
    "linear_cross_entropy": lambda hidden, weight, labels, vocab_size, workspace=None: ref.linear_cross_entropy(
        hidden, weight, labels, vocab_size
    ),
    "grouped_linear": grouped_linear.by_loop,
}
_TORCH: dict[str, Callable[..., Any]] = {
    "layer_norm": builtin.layer_norm,
    "rms_norm": builtin.rms_norm,
    "gelu": builtin.gelu,
    "swiglu": builtin.swiglu,
    "attention": builtin.sdpa,
    "cross_entropy": builtin.cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
    "grouped_linear": grouped_linear.by_grouped_mm,
}
_CPU: dict[str, Callable[..., Any]] = {**_TORCH, "attention": cpu_attention.attention}
# Fused elsewhere (in the gradient buffers), but named here so that one table shows everything that can be fused.
_NOT_A_MODEL_OP = ("wgrad_accumulation",)
OPS: tuple[str, ...] = (*_REF, *_NOT_A_MODEL_OP)


def resolve(spec: str, device_type: str, *, attention: str = "auto") -> Kernels:
    """`spec` is `--kernels`, `attention` is `--attention-backend` (flash, fused: SDPA; unfused, local: ref)."""
    mode, excluded = _parse(spec)
    if mode == "native":
        raise ConfigError("--kernels native: the native kernels are not built yet; use auto or ref")
    choices = [_choose(op, mode, op in excluded, device_type, attention) for op in OPS]
    tables = {"ref": _REF, "torch": _TORCH, "cpu": _CPU}
    functions = {choice.op: tables[choice.backend][choice.op] for choice in choices if choice.op in _REF}
    if functions["attention"] is ref.attention:
        functions["attention"] = partial(ref.attention, softmax_op=functions["softmax"])
    return Kernels(**functions, choices=tuple(choices))


def _parse(spec: str) -> tuple[str, frozenset[str]]:
    mode, *rest = (part.strip() for part in spec.split(","))
    if mode not in ("auto", "native", "ref"):
        raise ConfigError(f"--kernels {spec}: {mode!r} is not one of auto, native, ref")
    for part in rest:
        if not part.startswith("-"):
            raise ConfigError(f"--kernels {spec}: after {mode} only exclusions such as -rope may follow, not {part!r}")
        if part[1:] not in OPS:
            near = difflib.get_close_matches(part[1:], OPS, n=1)
            hint = f"did you mean -{near[0]}? " if near else ""
            raise ConfigError(f"--kernels {spec}: no operation {part[1:]!r}; {hint}there are {', '.join(OPS)}")
    return mode, frozenset(part[1:] for part in rest)


def _choose(op: str, mode: str, excluded: bool, device_type: str, attention: str) -> Choice:
    if excluded:
        return Choice(op, "ref", "left out by --kernels")
    if mode == "ref":
        return Choice(op, "ref", "--kernels ref")
    if op == "attention" and attention in ("unfused", "local"):
        return Choice(op, "ref", f"--attention-backend {attention}")
    if op == "attention" and attention in ("flash", "fused"):
        return Choice(op, "torch", f"--attention-backend {attention}: PyTorch's scaled_dot_product_attention")
    if op == "attention" and device_type == "cpu":
        return Choice(op, "cpu", "products over blocks of queries; PyTorch's own for long sequences and generation")
    if op == "linear_cross_entropy":
        return Choice(op, "torch", "the logits become their own gradient in place")
    if op == "grouped_linear":
        if device_type == "cuda":
            return Choice(op, "torch", "one product for all experts in bf16; one for each in other types")
        return Choice(op, "ref", "a product for each expert: PyTorch's grouped one is a loop here, and copies weights")
    if op in _TORCH:
        return Choice(op, "torch", "PyTorch's own fused function")
    return Choice(op, "ref", "no faster implementation is built")

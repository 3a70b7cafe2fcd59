"""One switch decides which implementation of every operation runs: `--kernels auto|native|ref[,-op...]`.

Resolved once, handed to constructors, printed as a table. It never changes the function that is computed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from megatron.errors import ConfigError
from megatron.ops import builtin, cpu_attention, grouped_linear, ref, sdpa_order, wgrad
from megatron.ops.library import Library, library, this_gpu
from megatron.ops.linear_cross_entropy import VocabularyPart, Workspace, linear_cross_entropy
from megatron.ops.native import OPERATIONS
from megatron.ops.native.operation import Fallbacks, on_stderr


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
    add_layer_norm: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    gelu: Callable[[Tensor, bool], Tensor]
    bias_gelu: Callable[[Tensor, Tensor, bool], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    geglu: Callable[[Tensor, bool], Tensor]
    squared_relu: Callable[[Tensor], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    bias_dropout_add: Callable[[Tensor, Tensor | None, Tensor, Callable[[Tensor], Tensor]], Tensor]
    softmax: Callable[[Tensor, Tensor | None, float, bool], Tensor]
    attention: Callable[..., Tensor]
    cross_entropy: Callable[[Tensor, Tensor], Tensor]
    linear_cross_entropy: Callable[..., Tensor]
    grouped_linear: Callable[..., Tensor]
    # For the optimizer; None leaves it to torch's own functions. See megatron/ops/native/optim.py.
    adamw: Callable[..., None] | None = None
    grad_norm: Callable[[Tensor], Tensor] | None = None
    # For data parallelism's buffers; None leaves weight gradients to backward. See megatron/ops/wgrad.py.
    wgrad_accumulation: wgrad.Accumulate | None = None
    choices: tuple[Choice, ...] = field(default=(), compare=False)
    note: str | None = field(default=None, compare=False)

    def table(self) -> str:
        """One line per operation: name, backend, reason; then, if there is one, what holds for all of them."""
        rows = [("op", "backend", "reason"), *((c.op, c.backend, c.reason) for c in self.choices)]
        op_width, backend_width = (max(len(row[column]) for row in rows) for column in (0, 1))
        lines = [f"{op:<{op_width}}  {backend:<{backend_width}}  {why}" for op, backend, why in rows]
        return "\n".join(lines if self.note is None else [*lines, self.note])


def _ref_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocab_size: int,
    workspace: Workspace | None = None,
    part: VocabularyPart | None = None,
) -> Tensor:
    if part is None:
        return ref.linear_cross_entropy(hidden, weight, labels, vocab_size)
    return linear_cross_entropy(hidden, weight, labels, vocab_size, workspace, part)  # ranks know no plainer formula


_REF: dict[str, Callable[..., Any]] = {
    "layer_norm": ref.layer_norm,
    "rms_norm": ref.rms_norm,
    "add_layer_norm": ref.of_sum(ref.layer_norm),
    "add_rms_norm": ref.of_sum(ref.rms_norm),
    "gelu": ref.gelu,
    "bias_gelu": ref.bias_gelu,
    "swiglu": ref.swiglu,
    "geglu": ref.geglu,
    "squared_relu": ref.squared_relu,
    "rope": ref.rope,
    "bias_dropout_add": ref.bias_dropout_add,
    "softmax": ref.softmax,
    "attention": ref.attention,
    "cross_entropy": ref.cross_entropy,
    "linear_cross_entropy": _ref_linear_cross_entropy,
    "grouped_linear": grouped_linear.by_loop,
}
_TORCH: dict[str, Callable[..., Any]] = {
    "layer_norm": builtin.layer_norm,
    "rms_norm": builtin.rms_norm,
    "add_layer_norm": ref.of_sum(builtin.layer_norm),
    "add_rms_norm": ref.of_sum(builtin.rms_norm),
    "gelu": builtin.gelu,
    "bias_gelu": builtin.bias_gelu,
    "swiglu": builtin.swiglu,
    "geglu": builtin.geglu,
    "attention": builtin.sdpa,
    "cross_entropy": builtin.cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
    "grouped_linear": grouped_linear.by_grouped_mm,
}
_CPU: dict[str, Callable[..., Any]] = {**_TORCH, "attention": cpu_attention.attention}
# Fused elsewhere (in the gradient buffers), but named here so that one table shows everything that can be fused.
_NOT_A_MODEL_OP = ("wgrad_accumulation", "adamw", "grad_norm")
OPS: tuple[str, ...] = (*_REF, *_NOT_A_MODEL_OP)


def resolve(
    spec: str,
    device_type: str,
    *,
    attention: str = "auto",
    native: Library | None = None,
    warn: Callable[[str], None] = on_stderr,
) -> Kernels:
    """`spec` is `--kernels`, `attention` is `--attention-backend` (flash, fused: SDPA; unfused, local: ref).

    `warn` is told, once, why `auto` runs something else than the table says.
    """
    mode, excluded = _parse(spec)
    native = library() if native is None else native
    why_not = why_not_native(native, device_type)
    if mode == "native" and why_not is not None:
        raise ConfigError(f"--kernels {spec}: the native kernels are {why_not}; or use --kernels auto")
    fallbacks = None if mode == "native" else Fallbacks(warn)
    choices, functions = [], {}
    for op in OPS:
        choice = _choose(op, mode, op in excluded, device_type, attention, native)
        choices.append(choice)
        if op in _REF:
            functions[op] = _function(choice, device_type, native, fallbacks)
        elif choice.backend == "native":
            functions[op] = OPERATIONS[op].make(native.ops)
        elif op == "wgrad_accumulation" and choice.backend == "torch":
            functions[op] = wgrad.accumulate
    if device_type == "cuda" and functions["attention"] is builtin.sdpa:
        functions["attention"] = partial(builtin.sdpa, order=sdpa_order.order(flash_first=attention == "flash"))
    if functions["attention"] is ref.attention:
        functions["attention"] = partial(ref.attention, softmax_op=functions["softmax"])
    note = None if native.missing is None or mode == "ref" else f"the native kernels are {native.missing}"
    return Kernels(**functions, choices=tuple(choices), note=note)


def left_to_compiler(kernels: Kernels) -> list[str]:
    """Of the operations with kernels of ours, those that a compiled layer does by their formulas."""
    native = (choice.op for choice in kernels.choices if choice.backend == "native")
    return [op for op in native if OPERATIONS[op].left_to_compiler]


def _function(choice: Choice, device_type: str, native: Library, fallbacks: Fallbacks | None) -> Callable[..., Any]:
    tables = {"ref": _REF, "torch": _TORCH, "cpu": _CPU}
    if choice.backend != "native":
        return tables[choice.backend][choice.op]
    fallback = {**_REF, **(_CPU if device_type == "cpu" else _TORCH)}[choice.op]
    return OPERATIONS[choice.op].with_fallback(native.ops, fallback, fallbacks)


def why_not_native(native: Library, device_type: str) -> str | None:
    """Why its kernels do not run there at all, or None."""
    if native.missing is not None:
        return native.missing
    if device_type == "cuda" and native.without_cuda is not None:
        return f"built without CUDA ({native.without_cuda})"
    if device_type == "cuda" and (reason := native.why_not_on(this_gpu())) is not None:
        return reason
    return None if device_type in ("cpu", "cuda") else f"not made for the device {device_type}"


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


def _choose(op: str, mode: str, excluded: bool, device_type: str, attention: str, native: Library) -> Choice:
    if excluded:
        return Choice(op, "ref", "left out by --kernels")
    if mode == "ref":
        return Choice(op, "ref", "--kernels ref")
    if op == "attention" and attention in ("unfused", "local"):
        return Choice(op, "ref", f"--attention-backend {attention}")
    if op == "attention" and attention in ("flash", "fused"):
        order = f": {sdpa_order.explanation(flash_first=attention == 'flash')}" if device_type == "cuda" else ""
        return Choice(op, "torch", f"--attention-backend {attention}: PyTorch's scaled_dot_product_attention{order}")
    why_not = None
    if op in OPERATIONS and (OPERATIONS[op].source or device_type != "cuda"):
        why_not = why_not_native(native, device_type)
        unverified = device_type == "cuda" and OPERATIONS[op].source in native.unverified
        if why_not is None and unverified and mode == "auto":
            why_not = "not yet verified on a GPU as it is (tools/gpu_check.py)"
        if why_not is None:
            verified = ", NOT verified on a GPU" if unverified else ""
            return Choice(op, "native", f"csrc{verified}{OPERATIONS[op].note}")
    choice = _choose_torch(op, device_type)
    if why_not is None or native.missing is not None:  # said once, under the table
        return choice
    return replace(choice, reason=f"{choice.reason}; native is {why_not}")


def _choose_torch(op: str, device_type: str) -> Choice:
    if op == "attention" and device_type == "cpu":
        return Choice(op, "cpu", "products over blocks of queries; PyTorch's own for long sequences and generation")
    if op == "linear_cross_entropy":
        return Choice(op, "torch", "the logits become their own gradient in place")
    if op == "grouped_linear":
        if device_type == "cuda":
            return Choice(op, "torch", "one product for all experts in bf16; one for each in other types")
        return Choice(op, "ref", "a product for each expert: PyTorch's grouped one is a loop here, and copies weights")
    if op == "wgrad_accumulation":
        return Choice(op, "torch", wgrad.explanation(device_type))
    if op in ("adamw", "grad_norm"):
        return Choice(op, "torch", "PyTorch's own functions, a tensor at a time")
    if op == "attention" and device_type == "cuda":
        return Choice(op, "torch", f"PyTorch's scaled_dot_product_attention: {sdpa_order.explanation()}")
    if op in _TORCH:
        return Choice(op, "torch", "PyTorch's own fused function")
    return Choice(op, "ref", "no faster implementation is built")

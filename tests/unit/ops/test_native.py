"""Every kernel of csrc/ on every backend of this machine against fp64; and the operations as torch sees them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.errors import ConfigError
from megatron.ops import resolve
from megatron.ops.activation import squared_relu, swiglu
from megatron.ops.proof import PROOFS, Draw, Proof, compare_call, flat_tensors
from megatron.ops.registry import OPERATIONS
from tests.helpers.declared import all_proofs, cpu_proofs, declared
from tests.helpers.kernels import BACKENDS, ORDERS, Backend, backend, emulator_order

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw(dtype: torch.dtype = torch.float32, seed: int = 1) -> Draw:
    return Draw(dtype, torch.Generator().manual_seed(seed))


def problems(proof: Proof, where: Backend, dtype: torch.dtype) -> list[str]:
    findings = ((call, finding) for call in proof.calls(draw(dtype))
                for finding in compare_call(proof, call, where.ops, where.device))  # fmt: skip
    return [f"{call.name}: {finding.tensor}: {finding.wrong}" for call, finding in findings if finding.wrong]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("op", PROOFS)
def test_kernel_against_fp64(op: str, name: str, dtype: torch.dtype) -> None:
    proof = PROOFS[op]
    if dtype in proof.dtypes:
        assert problems(proof, backend(name), dtype) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", cpu_proofs())
def test_a_cpus_own_kernel_against_fp64(op: str, dtype: torch.dtype) -> None:
    assert problems(cpu_proofs()[op], backend("cpu"), dtype) == []


@pytest.mark.parametrize("order", list(ORDERS)[1:])
@pytest.mark.parametrize("op", PROOFS)
def test_the_order_of_threads_and_blocks_does_not_matter(op: str, order: str) -> None:
    where = backend("emulated")
    with emulator_order(order):
        assert problems(PROOFS[op], where, PROOFS[op].dtypes[-1]) == []


def test_a_sum_of_squares_of_more_parts_than_a_block_has_threads() -> None:
    """Each part has 2^16 numbers, too slow for the table of proofs."""
    flat = torch.zeros(258 * 2**16 + 3, dtype=torch.bfloat16)
    flat[:: 2**16] = 1.0
    assert backend("emulated").ops.square_sum(flat) == 259


@pytest.mark.parametrize("op", all_proofs())
def test_two_threads_give_what_one_gives(op: str) -> None:
    where, proof, results = backend("cpu"), all_proofs()[op], []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with Recorder(where.namespace) as recorder:
                assert problems(proof, where, proof.dtypes[0]) == []
            results.append(recorder.results)
    finally:
        torch.set_num_threads(before)
    one, two = results
    assert len(one) == len(two) > 0
    assert all(torch.equal(a.nan_to_num(1e9), b.nan_to_num(1e9)) for a, b in zip(one, two))


class Recorder(TorchDispatchMode):
    """Records the first call of every operation of a namespace, and all results."""

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self.namespace = namespace
        self.calls: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.results: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == self.namespace:
            copies = tuple(arg.detach().clone() if isinstance(arg, torch.Tensor) else arg for arg in args)
            if not any(isinstance(arg, torch.Tensor) and arg.numel() == 0 for arg in args):
                self.calls.setdefault(func, (copies, dict(kwargs or {})))
            parts = (*(result if isinstance(result, tuple | list) else [result]), *args)  # some write their arguments
            self.results += [part.clone() for part in parts if isinstance(part, torch.Tensor)]
        return result


def registered(namespace: str) -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {name.split("::")[1] for name in names if name.startswith(f"{namespace}::")}


def test_opcheck_of_every_operation() -> None:
    """Schema, fake tensors, autograd and functionalisation are right for whatever the library registers."""
    where = backend("cpu")
    with Recorder(where.namespace) as recorder:
        for proof in all_proofs().values():
            for call in proof.calls(draw(proof.dtypes[0])):
                compare_call(proof, call, where.ops, where.device)
    assert {op.name().split("::")[1].split(".")[0] for op in recorder.calls} == registered(where.namespace)
    for op, (args, named) in recorder.calls.items():
        torch.library.opcheck(op, args if refuses_a_derivative(op, args, named) else differentiable(args), named)


def differentiable(args: tuple[Any, ...]) -> tuple[Any, ...]:
    copies = (arg.detach().clone() if isinstance(arg, torch.Tensor) else arg for arg in args)
    return tuple(arg.requires_grad_() if flat_tensors(arg) and arg.is_floating_point() else arg for arg in copies)


def refuses_a_derivative(op: Any, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """True if it refuses a derivative, like derivatives and internal operations. The proofs cover the others."""
    if op._schema.is_mutable:  # torch registers no derivative of these, and opcheck knows how to call them
        return False
    leaves = differentiable(args)
    outputs = [output for output in flat_tensors(op(*leaves, **named)) if output.requires_grad]
    try:
        torch.autograd.grad([output.sum() for output in outputs], flat_tensors(list(leaves))[:1], allow_unused=True)
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize("op", [op for op, proof in PROOFS.items() if op in OPERATIONS and proof.folder != "optim"])
def test_a_second_derivative_is_right_or_refused(op: str) -> None:
    """PyTorch would take it for zero and only warn."""

    def twice(function: Callable[..., Any]) -> torch.Tensor:
        args = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in call.args]
        x = args[0].requires_grad_()
        outputs = flat_tensors(function(*args))
        (once,) = torch.autograd.grad([out.sin().sum() for out in outputs], x, create_graph=True)
        return torch.autograd.grad(once.cos().sum(), x)[0]

    proof, kernel = PROOFS[op], PROOFS[op].kernel(backend("cpu").ops)
    call = next(call for call in proof.calls(draw()) if call.args[0].numel() > 8)
    if op == "rope":
        torch.testing.assert_close(twice(kernel), twice(proof.oracle))
    elif op == "linear_cross_entropy":  # PyTorch's own refusal: once_differentiable
        with pytest.raises(RuntimeError):
            twice(kernel)
    else:
        with pytest.raises(ConfigError, match="this native kernel has no derivative; use --kernels ref"):
            twice(kernel)


def test_an_operation_inside_a_compiled_graph() -> None:
    where = backend("cpu")
    x = torch.randn(4, 64, requires_grad=True)
    compiled = torch.compile(lambda value: where.ops.swiglu_forward(value) * 2, fullgraph=True)
    (gradient,) = torch.autograd.grad(compiled(x).sum(), x)
    (expected,) = torch.autograd.grad((swiglu(x) * 2).sum(), x)
    torch.testing.assert_close(gradient, expected)


REFUSED = declared("REFUSED")


def test_every_operation_refuses_something() -> None:
    """Excludes the optimizer's kernels, which only get its own flat buffers."""
    assert set(REFUSED) == {
        name for name, row in OPERATIONS.items() if row.native is not None and row.native.folder != "optim"
    }


@pytest.mark.parametrize(("op", "args", "reason"), [(op, *case) for op, cases in REFUSED.items() for case in cases])
def test_strict_names_the_operation_the_shape_and_what_would_do(op: str, args: tuple[Any, ...], reason: str) -> None:
    backend("cpu")
    tensors, named = (args[:-1], args[-1]) if isinstance(args[-1], dict) else (args, {})
    with pytest.raises(ConfigError) as caught:
        getattr(resolve("native", "cpu"), op)(*tensors, **named)
    said = str(caught.value)
    assert (
        said.startswith(f"--kernels native: {op} does not support ")
        and ": the kernel needs " in said
        and said.endswith("; use --kernels auto")
    )
    assert reason in said and "\n" not in said


def test_the_fallback_runs_and_is_said_once() -> None:
    """Prints one line for all operations, because in fp64 it holds for all."""
    backend("cpu")
    said: list[str] = []
    kernels = resolve("auto", "cpu", warn=said.append)
    x = torch.randn(2, 4, dtype=torch.float64)
    torch.testing.assert_close(kernels.swiglu(x), swiglu(x))
    torch.testing.assert_close(kernels.squared_relu(x), squared_relu(x))
    kernels.swiglu(x[:1])
    (line,) = said
    assert line.startswith(
        "swiglu: native kernels do not support float64: the kernel needs float32, bfloat16 or float16; "
    )
    kernels.add_rms_norm(x, x.float(), x[0], 1e-5)
    assert len(said) == 2 and said[1].startswith("add_rms_norm: native kernels do not support x float64 and a resid")


def test_a_fallback_is_no_warning_of_python_with_a_line_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    backend("cpu")
    resolve("auto", "cpu").squared_relu(torch.ones(2, dtype=torch.float64))
    assert re.fullmatch(r"warning: squared_relu: native kernels do not support float64: .*\n", capsys.readouterr().err)


def test_the_table_names_the_kernels() -> None:
    backend("cpu")
    assert any(line.split()[:3] == ["swiglu", "native", "csrc"] for line in resolve("auto", "cpu").table().splitlines())

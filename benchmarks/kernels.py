"""Compares every kernel of csrc/ with PyTorch, torch.compile, and a copy of the bytes it must move.

    python benchmarks/kernels.py                                  # every operation, fp32 and bf16, one thread
    python benchmarks/kernels.py --op swiglu --dtype bf16 --threads 2 --rounds 50
    python benchmarks/kernels.py --device cuda --json result.json

A case is a forward pass and, if it exists, a backward pass. The contenders take turns within every round. Times are
medians over rounds: CPU time of this process with one thread, wall clock otherwise. The floor copies as many bytes as
the operation must read and write. The process keeps freed memory, as in training, because touching a fresh page costs
more than the arithmetic on it. GPUs get many more rows (grown.py).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.parts.adamw import (
    SHARDS,
    adamw_formula,
    adamw_formula_of_shards,
    adamw_inputs,
    our_adamw,
    our_adamw_of_shards,
    shards_inputs,
    torchs_adamw,
    torchs_adamw_of_shards,
)
from benchmarks.parts.expert_rows import TOKENS, WIDTH, taken_inputs, weighted_inputs
from benchmarks.parts.grown import grown
from megatron.ops.documents import Documents
from megatron.ops.library import library
from megatron.ops.operation import Target
from megatron.ops.proof import flat_tensors
from megatron.ops.registry import OPERATIONS
from megatron.ops.sdpa import sdpa
from megatron.utils.cpu import set_allocator

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CONTENDERS = ("ours", "eager", "compile", "floor")


@dataclass(frozen=True)
class Case:
    """One operation to measure. `ours(torch.ops.<namespace>)` is the kernel, `eager` PyTorch's best function, and
    `formula` the input of torch.compile."""

    op: str
    shape: str
    ours: Callable[[Any], Callable[..., Any]]
    eager: Callable[..., Any]
    formula: Callable[..., Any]
    inputs: Callable[[torch.dtype, str], tuple[Any, ...]]
    moved: Callable[[tuple[Any, ...]], int]  # bytes that must be read and written
    differentiable: bool = True
    constants: tuple[int, ...] = ()  # positions of the arguments that have no gradient
    cpu_only: bool = False

    def runs_on(self, device: str) -> bool:
        return device == "cpu" or not self.cpu_only


def case_of(op: str, shape: str, inputs: Any, moved: Callable[[tuple[Any, ...]], int], **options: Any) -> Case:
    """Makes the case of a model's operation. The peer is PyTorch's own function, or the formula if there is none.
    `options` are fields of Case, and `arguments`: keyword arguments that every contender gets."""
    operation, arguments = OPERATIONS[op], options.pop("arguments", {})
    eager = options.pop("eager", operation.without_native(Target("cpu")).function)
    formula = options.pop("formula", operation.formula)
    assert operation.native is not None
    bound = operation.native.bound
    return Case(
        op=op,
        shape=shape,
        ours=lambda ops: partial(bound(ops), **arguments),
        eager=partial(eager, **arguments),
        formula=partial(formula, **arguments),
        inputs=inputs,
        moved=moved,
        **options,
    )


def size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def randn(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def angles(seq: int, half: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Returns cos and sin [1, seq, 1, half], as a model passes them to its layers."""
    angle = torch.arange(seq, device=device)[:, None] * 10000 ** -torch.linspace(0, 1, half, device=device)
    return angle.cos().to(dtype)[None, :, None], angle.sin().to(dtype)[None, :, None]


def norm_inputs(summed: bool, bias: bool) -> Callable[[torch.dtype, str], tuple[Any, ...]]:
    def inputs(dtype: torch.dtype, device: str) -> tuple[Any, ...]:
        wide = [randn(4096, 768, dtype=dtype, device=device) for _ in range(1 + summed)]
        return *wide, *(randn(768, dtype=dtype, device=device) for _ in range(1 + bias)), 1e-5

    return inputs


def norm_case(op: str, *, summed: bool = False, bias: bool = False) -> Case:
    # Passes over memory: x -> out (forward), x and grad -> grad_x (backward). With a residual sum, the residual, the
    # sum and the gradient of the sum are added.
    passes = 8 if summed else 5
    return case_of(op, "4096 x 768", norm_inputs(summed, bias), lambda args: size(args[0]) * passes)


def gelu_case(op: str, name: str, tanh: bool, *tensors: tuple[int, ...], passes: float = 5) -> Case:
    return case_of(
        op,
        f"4096 x {name}, {'tanh' if tanh else 'erf'}",
        lambda dtype, device: (*(randn(*shape, dtype=dtype, device=device) for shape in tensors), tanh),
        lambda args: int(size(args[0]) * passes),
    )


def attention_inputs(batch: int, heads: int, seq: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Draws queries, keys and values in the layout of a projection: the heads of a token are adjacent."""
    return tuple(randn(batch, seq, heads, 64, dtype=dtype, device=device).transpose(1, 2) for _ in range(3))


def packed_attention_case(batch: int, heads: int, seq: int, length: int) -> Case:
    """Attention within documents of one length. PyTorch's function gets a precomputed mask."""
    documents = Documents.of_starts(torch.arange(batch * seq).view(batch, seq) % length == 0)
    masks = cache(lambda device: documents.to(torch.device(device)).mask(seq, None))

    def masked(query: Tensor, key: Tensor, value: Tensor, **ignored: Any) -> Tensor:
        return sdpa(query, key, value, mask=masks(query.device.type), causal=False, scale=0.125)

    return case_of(
        "packed_attention",
        f"{batch}, {heads}, {seq}, 64, documents of {length}",
        partial(attention_inputs, batch, heads, seq),
        lambda args: size(args[0]) * 11,
        arguments={"documents": documents, "left": None, "scale": 0.125},
        eager=masked,
        formula=masked,
        cpu_only=True,
    )


CASES: tuple[Case, ...] = (
    norm_case("rms_norm"),
    norm_case("layer_norm", bias=True),
    norm_case("add_rms_norm", summed=True),
    norm_case("add_layer_norm", summed=True, bias=True),
    case_of(
        "rope",
        "4 x 1024 x 12 x 64",
        lambda dtype, device: (randn(4, 1024, 12, 64, dtype=dtype, device=device), *angles(1024, 32, dtype, device)),
        lambda args: size(args[0]) * 4,
        constants=(1, 2),
    ),
    *(gelu_case("gelu", "3072", tanh, (4096, 3072)) for tanh in (True, False)),
    *(gelu_case("geglu", "2*2048", tanh, (4096, 4096), passes=4) for tanh in (True, False)),
    case_of(
        "squared_relu",
        "4096 x 3072",
        lambda dtype, device: (randn(4096, 3072, dtype=dtype, device=device),),
        lambda args: size(args[0]) * 5,
    ),
    case_of(
        "swiglu",
        "4096 x 2*2048",
        lambda dtype, device: (randn(4096, 4096, dtype=dtype, device=device),),
        lambda args: size(args[0]) * 8 // 2,  # forward 1 + 1/2, backward 1 + 1/2 + 1
    ),
    case_of("taken", f"{TOKENS} x 2 x {WIDTH}", taken_inputs, lambda args: size(args[0]) * 6),
    case_of("weighted_sum", f"{TOKENS} x 2 x {WIDTH}", weighted_inputs, lambda args: size(args[0]) * 9 // 2),
    case_of(
        "cross_entropy",
        "1024 x 32768",
        lambda dtype, device: (
            randn(1024, 32768, dtype=dtype, device=device),
            torch.randint(32768, (1024,), device=device),
        ),
        lambda args: size(args[0]) * 3,  # forward 1, backward 1 + 1
    ),
    case_of(
        "softmax",
        "48 x 256 x 1024, causal",
        lambda dtype, device: (randn(4, 12, 256, 1024, dtype=dtype, device=device),),
        lambda args: size(args[0]) * 5,  # forward 1 + 1, backward 2 + 1
        arguments={"mask": None, "scale": 0.125, "causal": True},
    ),
    *(
        case_of(
            "attention",
            f"{batch}, {heads}, {seq}, 64, causal",
            partial(attention_inputs, batch, heads, seq),
            lambda args: size(args[0]) * 11,  # forward 3 + 1, backward 4 + 3
            arguments={"mask": None, "causal": True, "scale": 0.125},
            eager=sdpa,
            formula=sdpa,
            cpu_only=True,
        )
        for batch, heads, seq in ((8, 6, 256), (8, 8, 512), (4, 12, 1024), (2, 8, 2048))
    ),
    packed_attention_case(4, 12, 2048, 256),
)


OPTIMIZER_CASES = (
    Case(
        op="adamw",
        shape="50M",
        ours=our_adamw,
        eager=torchs_adamw,
        formula=adamw_formula,
        inputs=adamw_inputs,
        moved=lambda args: args[0].numel() * (8 + 16 + 2 + args[4].element_size()),
        differentiable=False,
    ),
    Case(
        op="adamw",
        shape="the last 25M of 50M",
        ours=our_adamw,
        eager=torchs_adamw,
        formula=adamw_formula,
        inputs=partial(adamw_inputs, ranks=2),
        moved=lambda args: args[0].numel() * (8 + 16 + 2 + args[4].element_size()),
        differentiable=False,
    ),
    Case(
        op="adamw",
        shape=f"{len(SHARDS)} shards, {sum(SHARDS) / 1e6:.0f}M",
        ours=our_adamw_of_shards,
        eager=torchs_adamw_of_shards,
        formula=adamw_formula_of_shards,
        inputs=shards_inputs,
        moved=lambda args: args[0].numel() * (8 + 16 + args[3].element_size()),
        differentiable=False,
    ),
    Case(
        op="grad_norm",
        shape="50M",
        ours=lambda ops: ops.square_sum,
        eager=lambda x: torch.linalg.vector_norm(x.view(-1, 4000), dim=1).double().square().sum(),
        formula=lambda x: x.view(-1, 4000).float().square().sum(1).double().sum(),
        inputs=lambda dtype, device: (randn(50_000_000, dtype=dtype, device=device),),
        moved=lambda args: size(args[0]),
        differentiable=False,
    ),
)
CASES += OPTIMIZER_CASES


def step_of(function: Callable[..., Any], args: Sequence[Any], case: Case) -> Callable[[], None]:
    """Makes a step of one forward and backward pass, which does not accumulate gradients."""
    if not case.differentiable:
        return lambda: function(*args)
    chosen = [i for i, arg in enumerate(args) if _floating(arg) and i not in case.constants]
    leaves = [arg.detach().clone().requires_grad_() if i in chosen else arg for i, arg in enumerate(args)]
    wanted = [leaves[i] for i in chosen]
    with torch.no_grad():
        upstreams = [torch.randn_like(output) for output in flat_tensors(function(*args))]

    def step() -> None:
        torch.autograd.grad(flat_tensors(function(*leaves)), wanted, upstreams)

    return step


def _floating(arg: Any) -> bool:
    return isinstance(arg, Tensor) and arg.is_floating_point()


def contenders(
    case: Case, dtype: torch.dtype, device: str, only: Sequence[str], failed: dict[str, str]
) -> dict[str, Callable[[], None]]:
    args = case.inputs(dtype, device) if device == "cpu" else grown(case.inputs(dtype, device))
    source = torch.randn(case.moved(args) // 8, device=device)
    target = torch.empty_like(source)
    makers: dict[str, Callable[[], Callable[[], Any]]] = {
        "ours": lambda: step_of(case.ours(library().ops), args, case),
        "eager": lambda: step_of(case.eager, args, case),
        "compile": lambda: step_of(torch.compile(case.formula), args, case),
        "floor": lambda: lambda: target.copy_(source),
    }
    made = {}
    for name in CONTENDERS:
        try:
            if name in only:
                made[name] = makers[name]()
        except Exception as error:
            failed[name] = reason(error)
    return made


def seconds_of(step: Callable[[], None], device: str, clock: Callable[[], float]) -> float:
    if device == "cpu":
        start = clock()
        step()
        return clock() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def measure(case: Case, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measures a case. A contender that fails is left out, with the reason, so that the script continues."""
    clock = time.process_time if args.threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    steps = contenders(case, DTYPES[dtype], args.device, args.only, failed)
    for turn in range(args.warmup + args.rounds):
        for name, step in list(steps.items()):
            try:
                seconds = seconds_of(step, args.device, clock)
            except Exception as error:
                failed[name] = reason(error)
                steps.pop(name)
                continue
            if turn >= args.warmup:
                times.setdefault(name, []).append(seconds)
    milliseconds = {name: 1e3 * statistics.median(values) for name, values in times.items() if name not in failed}
    return {"op": case.op, "shape": case.shape, "dtype": dtype, "ms": milliseconds, "failed": failed}


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


def line(result: dict[str, Any]) -> str:
    times: dict[str, float] = result["ms"]
    parts = [f"{result['op']:<20} {result['shape']:<24} {result['dtype']:<5}"]
    parts += [f"{name} {value:8.3f} ms" for name, value in times.items()]
    if "ours" in times:
        parts += [f"{value / times['ours']:5.2f}x {name}" for name, value in times.items() if name != "ours"]
    parts += [f"{name} FAILED: {said}" for name, said in result["failed"].items()]
    return "  ".join(parts)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--op", nargs="+", choices=sorted({case.op for case in CASES}), help="operations to measure (default: all)"
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="contenders to run")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=math.inf, help="time after which no case starts")
    parser.add_argument("--json", type=Path, help="file for the results, written after every case")
    args = parser.parse_args(arguments)
    if library().missing is not None:
        parser.error(f"the kernels are {library().missing}")
    set_allocator("auto")
    torch.set_num_threads(args.threads)
    until, results = time.monotonic() + args.seconds, []
    chosen = [case for case in CASES if (args.op is None or case.op in args.op) and case.runs_on(args.device)]
    for dtype in args.dtype:
        for case in chosen if time.monotonic() < until else ():
            results.append(measure(case, dtype, args))
            print(line(results[-1]), flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=1) + "\n")
            if time.monotonic() > until:
                print(f"--seconds {args.seconds:.0f} are over", flush=True)
                break
    return results


if __name__ == "__main__":
    main()

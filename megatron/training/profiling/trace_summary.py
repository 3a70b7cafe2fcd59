"""Splits a traced step's time into GEMM, attention, optimizer, communication and other categories.

On a CPU, every moment of the training thread belongs to the innermost operation. A moment without computation counts as
communication while a collective is in flight, else as idle. On an accelerator, the kernels' times are counted.
Communication counts if nothing is computed meanwhile; hidden communication is reported separately.
"""

import gzip
import heapq
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import DataError

STEP = "step "  # the name of the range around every iteration, before its number
CATEGORIES = ("GEMM", "attention", "elementwise", "optimizer", "communication", "data", "idle")
_LATEST = 1e18  # microseconds
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")

_COMMUNICATION = re.compile(r"^c10d::|^gloo:|^nccl|ncclDev|^mpi:|reduce_scatter|all_?gather|all_?reduce", re.I)
# An event with this name lasts from start to end of a collective. Other events of its thread do not nest in it.
_UNDER_WAY = re.compile(r"^(gloo|nccl):")
# A compiled layer's trace does not show which module a kernel belongs to. Batched products count as
# attention, although a few of them multiply the rows of experts by router weights.
_ATTENTION = re.compile(r"attention|flash|fmha|sdpa|^megatron_native::(softmax|block)_|^aten::(bmm|baddbmm)_?$", re.I)
_PRODUCT = re.compile(
    r"^aten::(mm|addmm|matmul|linear|_grouped_mm|mv|addmv)_?$|^mkldnn::|gemm|cutlass|nvjet|xmma", re.I
)
_COMPILED = re.compile(r"^## Call CompiledFxGraph")
_OPTIMIZER = re.compile(r"^optimizer$|adam|multi_tensor", re.I)


@dataclass(frozen=True)
class OperationTime:
    name: str
    category: str
    seconds: float
    calls: int


@dataclass(frozen=True)
class Summary:
    """Seconds per step. `seconds` adds up to `wall`; `hidden` is communication during computation."""

    steps: int
    wall: float
    seconds: dict[str, float]
    hidden: float
    slowest: tuple[OperationTime, ...]

    def table(self, width: int = 40) -> str:
        lines = [f"{self.steps} step{'s' if self.steps != 1 else ''} of {1e3 * self.wall:.1f} ms"]
        for category in CATEGORIES:
            seconds = self.seconds[category]
            share = seconds / self.wall if self.wall else 0.0
            bar = "#" * round(share * width)
            lines.append(f"  {category:<14}{1e3 * seconds:>10.1f} ms {share:>6.1%}  {bar}".rstrip())
        if self.hidden:
            lines.append(f"  {'(hidden communication':<14}{1e3 * self.hidden:>10.1f} ms, beside computation)")
        lines.append("  the slowest operations, without nested ones:")
        lines += [
            f"  {1e3 * op.seconds:>10.1f} ms {op.calls:>7} calls  {op.category:<14}{op.name[:70]}"
            for op in self.slowest
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Event:
    name: str
    kind: str
    start: float  # microseconds
    end: float
    thread: tuple[Any, Any]


def read_trace(path: Path) -> list[Event]:
    """Reads the timed events of a trace written by PyTorch (.json or .json.gz)."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: not a regular file; name a trace that --profile wrote")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return [_event(e) for e in json.loads(raw)["traceEvents"] if dict.get(e, "ph") == "X"]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); name a trace that --profile wrote") from None
    except (ValueError, KeyError, TypeError, EOFError, OverflowError, RecursionError, zlib.error) as error:
        raise DataError(f"{path}: not a trace of --profile ({type(error).__name__}); name another file") from None


def _event(entry: dict[str, Any]) -> Event:
    name, kind, start, length = entry["name"], entry.get("cat", ""), float(entry["ts"]), float(entry["dur"])
    if not (isinstance(name, str) and isinstance(kind, str) and abs(start) + abs(length) < _LATEST and length >= 0):
        raise ValueError("a name that is not text, or an invalid time")
    return Event(name, kind, start, start + length, (entry["pid"], entry["tid"]))


def summarise(events: Sequence[Event], slowest: int = 10) -> Summary:
    steps = [e for e in events if e.kind == "user_annotation" and re.fullmatch(rf"{STEP}\d+", e.name)]
    if not steps:
        raise DataError("the trace does not contain a whole step; trace one with --profile")
    on_device = any(event.kind in KERNELS for event in events)
    pieces = list(_device_pieces(events) if on_device else _thread_pieces(events, steps[0].thread))
    end = max([step.end for step in steps] + ([e.end for e in events if e.kind in KERNELS] if on_device else []))
    wall = end - min(step.start for step in steps)
    totals: dict[str, float] = defaultdict(float)
    operations: dict[tuple[str, str], tuple[float, set[float]]] = {}
    for piece in pieces:
        totals[piece.category] += piece.end - piece.start
        if piece.category != "idle":
            seconds, calls = operations.get((piece.name, piece.category), (0.0, set()))
            calls.add(piece.began)
            operations[piece.name, piece.category] = (seconds + piece.end - piece.start, calls)
    hidden = totals.pop("hidden", 0.0)
    totals["idle"] = wall - sum(seconds for category, seconds in totals.items() if category != "idle")
    scale = 1e-6 / len(steps)
    ranked = heapq.nlargest(slowest, operations.items(), key=lambda item: item[1][0])
    return Summary(
        steps=len(steps),
        wall=wall * scale,
        seconds={category: totals[category] * scale for category in CATEGORIES},
        hidden=hidden * scale,
        slowest=tuple(
            OperationTime(name, category, spent * scale, round(len(calls) / len(steps)))
            for (name, category), (spent, calls) in ranked
            if category != "hidden"
        ),
    )


@dataclass(frozen=True)
class TimeSlice:
    """Time slice that belongs to one operation, which began at `began`."""

    category: str
    name: str
    start: float
    end: float
    began: float


# ---------------------------------------------------------------- the CPU: one thread's nested operations


def _thread_pieces(events: Sequence[Event], thread: tuple[Any, Any]) -> Iterator[TimeSlice]:
    mine, elsewhere = [], []
    for event in events:
        if event.thread == thread and not _UNDER_WAY.search(event.name):
            mine += [event] if event.kind in ("cpu_op", "user_annotation") else []
        elif _COMMUNICATION.search(event.name):
            elsewhere.append(event)
    under_way = _merged((e.start, e.end) for e in elsewhere)
    for start, end, stack in _moments(mine):
        category = _category(stack)
        waited = 0.0
        if not _computes(stack[-1]) and category not in ("communication", "data"):
            for begin, until in under_way:
                if seconds := max(0.0, min(end, until) - max(start, begin)):
                    moment = start + waited
                    yield TimeSlice("communication", "waiting for a collective", moment, moment + seconds, begin)
                    waited += seconds
        if category != "idle" and waited < end - start:
            yield TimeSlice(category, stack[-1].name, start + waited, end, stack[-1].start)


def _computes(event: Event) -> bool:
    """True for events that compute. Marks and autograd functions wrap computation in Python, which may wait."""
    if event.kind != "cpu_op" or event.name.startswith("autograd::"):
        return False
    return "::" in event.name or _COMPILED.search(event.name) is not None


def _moments(events: Iterable[Event]) -> Iterator[tuple[float, float, list[Event]]]:
    """Yields slices of one thread's time between begins and ends of operations, with the open operations."""
    stack: list[Event] = []
    now = 0.0
    for event in sorted(events, key=lambda e: (e.start, -e.end)):
        while stack and stack[-1].end <= event.start:
            if now < stack[-1].end:
                yield now, stack[-1].end, list(stack)
            now = max(now, stack.pop().end)
        if stack and now < event.start:
            yield now, event.start, list(stack)
        now = event.start
        stack.append(event)
    while stack:
        if now < stack[-1].end:
            yield now, stack[-1].end, list(stack)
        now = max(now, stack.pop().end)


def _category(stack: Sequence[Event]) -> str:
    """Category of a slice, given the open operations. Enclosing operations decide before the innermost: a product in
    attention counts as attention."""
    names = [event.name for event in stack]
    operations = [event.name for event in stack if event.kind == "cpu_op"]
    if any(_COMMUNICATION.search(name) for name in operations):
        return "communication"
    if any(_OPTIMIZER.search(name) for name in names):
        return "optimizer"
    if any(_ATTENTION.search(name) for name in operations):
        return "attention"
    if operations and _PRODUCT.search(operations[-1]):
        return "GEMM"
    if "batch-generator" in names:
        return "data"
    return "elementwise" if _computes(stack[-1]) else "idle"


# ---------------------------------------------------------------- an accelerator: kernels on several streams


def _device_pieces(events: Sequence[Event]) -> Iterator[TimeSlice]:
    kernels = sorted((e for e in events if e.kind in KERNELS), key=lambda e: e.start)
    optimizer = _merged((e.start, e.end) for e in events if e.kind == "gpu_user_annotation" and e.name == "optimizer")
    work = [e for e in kernels if not _COMMUNICATION.search(e.name)]
    busy = _merged((e.start, e.end) for e in work)
    yield from _unshared(work, lambda e: _kernel_category(e, optimizer))
    for event in kernels:
        if not _COMMUNICATION.search(event.name):
            continue
        covered = sum(max(0.0, min(event.end, b) - max(event.start, a)) for a, b in busy)
        yield TimeSlice("hidden", event.name, event.start, event.start + covered, event.start)
        yield TimeSlice("communication", event.name, event.start + covered, event.end, event.start)


def _unshared(kernels: Sequence[Event], category: Any) -> Iterator[TimeSlice]:
    """Yields slices without overlap: of kernels that run at once, the one that began first gets the time."""
    until = 0.0
    for event in kernels:
        start = max(event.start, until)
        if start < event.end:
            yield TimeSlice(category(event), event.name, start, event.end, event.start)
            until = event.end


def _kernel_category(event: Event, optimizer: Sequence[tuple[float, float]]) -> str:
    if any(a <= event.start < b for a, b in optimizer) or _OPTIMIZER.search(event.name):
        return "optimizer"
    if _ATTENTION.search(event.name):
        return "attention"
    return "GEMM" if _PRODUCT.search(event.name) else "elementwise"


def _merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    result: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result

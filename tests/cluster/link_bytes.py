"""Bytes that a rank sends in a step: as recorded, and by the formulas of docs/scale.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch

from megatron.layout import Layout
from megatron.prove.order.events import Mark, Op, Recording
from megatron.prove.order.record import LATER

ACTIVATION, GRADIENT = 2, 4  # bytes: bf16 and fp32


def sent(kind: str, given: int, members: int) -> Fraction:
    """Bytes that leave a rank which contributes `given`, for bandwidth-optimal algorithms such as a ring."""
    others = Fraction(members - 1, members)
    factors = {"all_reduce": 2 * others, "reduce_scatter": others, "all_to_all": others, "all_gather": members - 1}
    return given * Fraction(factors[kind])


def seen(recording: Recording, layout: Layout) -> dict[str, Fraction]:
    """Bytes of the second step by axis, without numbers in double precision and counts of rows."""
    found: defaultdict[str, Fraction] = defaultdict(Fraction)
    for op in second_step(recording):
        ranks = recording.groups[op.group].ranks
        for message in op.messages:
            if message.side == "send":
                name = "cp" if ranks in layout.groups("cp") else "pp"
                found[name] += message.size * _bytes(message.dtype)
        if op.is_collective and op.dtype in ("bfloat16", "float32"):
            found[_axis(op, ranks, layout)] += sent(op.kind, op.given * _bytes(op.dtype), len(ranks))
    return dict(found)


def numbers(recording: Recording) -> int:
    """Bytes given in double precision."""
    return sum(8 * op.given for op in second_step(recording) if op.dtype == "float64")


def second_step(recording: Recording) -> Iterator[Op]:
    inside = False
    for event in recording.events:
        if isinstance(event, Mark):
            inside = event.name == LATER
        elif inside and isinstance(event, Op):
            yield event


def _axis(op: Op, ranks: tuple[int, ...], layout: Layout) -> str:
    """Axis of a collective. No two axes with the same kind of traffic have the same ranks in these layouts."""
    if op.kind == "all_to_all" or (op.dtype == "bfloat16" and ranks in layout.groups("cp")):
        return "cp" if layout.cp > 1 else "ep"
    for name in ("tp", "dp_cp", "expert_dp", "embedding", "shard", "replicate"):
        if len(ranks) > 1 and ranks in layout.groups(name):
            return name
    raise AssertionError(f"{op} among {ranks}")


def _bytes(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape of a GPT with tied embeddings, learned positions and biases, as one rank of a layout runs it."""

    layers: int
    hidden: int
    kv: int
    """Width of all keys."""
    vocabulary: int
    """Rows of the token embedding, padding included."""
    positions: int
    batch: int
    seq: int
    """Tokens of a whole sequence."""
    micro_batches: int
    chunks: int = 1
    """Virtual pipeline stages of a rank."""


def expected(shape: Shape, layout: Layout, rank: int, *, sp: bool, kind: str, divided: bool) -> Mapping[str, Fraction]:
    """Bytes by axis; docs/scale.md, "Bytes between ranks", has the formulas."""
    t, c, p, n = layout.tp, layout.cp, layout.pp, layout.dp * layout.cp
    within, instances = layout.shard, layout.instances
    stage = rank // (layout.world_size // p)
    first, last = stage == 0, stage == p - 1
    m, layers, h = shape.micro_batches, Fraction(shape.layers, p), shape.hidden
    a = ACTIVATION * shape.batch * Fraction(shape.seq, c) * h
    keys = 2 * ACTIVATION * shape.batch * Fraction(shape.seq, c) * Fraction(shape.kv, t)
    tp = Fraction(t - 1, t)
    found: dict[str, Fraction] = {}
    if t > 1:
        ends = int(first) + int(last)
        passes = (10 * layers + 2 * ends) * a if sp else 2 * (4 * layers + ends) * a
        loss = 2 * 4 * 3 * shape.batch * Fraction(shape.seq, c) * last
        replicated = 6 * h * layers + shape.positions * h * first + 2 * h * last
        found["tp"] = tp * (m * (passes + loss) + (2 * GRADIENT * replicated if sp else 0))
    if c > 1:
        of_kind = {
            "p2p": (2 * (c - 1) + Fraction(GRADIENT, ACTIVATION) * c) * keys,
            "a2a": 2 * Fraction(c - 1, c) * (2 * a / t + keys),
            "allgather": 2 * (c - 1) * keys,
        }
        found["cp"] = m * layers * of_kind[kind]
    if p > 1:
        messages = shape.chunks - last + shape.chunks - first
        found["pp"] = m * messages * a / (t if sp else 1)
        if first or last:
            found["embedding"] = Fraction(GRADIENT * shape.vocabulary * h, t * (within if divided else 1))
    if n > 1:
        layer = Fraction(12 * h * h - 2 * h * (h - shape.kv) + 7 * h - 2 * (h - shape.kv), t) + 6 * h
        table = Fraction(shape.vocabulary * h, t) * (first or last)
        held = layers * layer + table + shape.positions * h * first + 2 * h * last
        back = ACTIVATION if divided else GRADIENT  # weights gathered, or the sums
        found["dp_cp" if instances == 1 else "shard"] = Fraction(within - 1, within) * (GRADIENT + back) * held
        found["replicate"] = 2 * Fraction(instances - 1, instances) * GRADIENT * held / within
    return found

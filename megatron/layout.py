"""Parallel layout: the ranks of each group. Pure arithmetic, no torch.

Ranks are numbered with tensor parallel fastest, then context, data and pipeline parallel (Megatron's order):

    rank = tp + TP * (cp + CP * (dp + DP * pp))

Expert parallelism is not a factor of the world size. It divides the CP x DP ranks of a pipeline stage and tensor slice.
With `j = cp + CP * dp`, the expert coordinate is `j % EP`, and `j // EP` numbers the replicas of each expert.

ZeRO splits these CP x DP ranks into optimizer instances: equal runs of neighbours (Megatron's order). Ranks of an
instance divide its state among them. Ranks at the same place of all instances hold the same share.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

from megatron.errors import ConfigError

TP_FLAG = "--tensor-model-parallel-size"
CP_FLAG = "--context-parallel-size"
EP_FLAG = "--expert-model-parallel-size"
PP_FLAG = "--pipeline-model-parallel-size"
INSTANCES_FLAG = "--num-distributed-optimizer-instances"

RANK_ORDER = "tp-cp-dp-pp"
"""The factors of the rank, the fastest first."""

AXES = (
    *("tp", "cp", "ep", "dp", "pp", "dp_cp", "expert_dp", "shard", "expert_shard", "replicate"),
    *("embedding", "model", "world"),
)
"""Every axis that has groups.

Gradients of dense parameters are reduced over `dp_cp`, those of experts over `expert_dp`. Within an instance of the
optimizer these are `shard` and `expert_shard`, and `replicate` joins the instances. With one instance the three are
`dp_cp`, `expert_dp` and each rank by itself. The axis `embedding` joins the first and the last pipeline stage (a tied
head is on both). A group of `model` (tp x pp) holds one replica of the model, and `world` is all ranks.
"""


@dataclass(frozen=True)
class Coordinates:
    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    expert_dp: int
    instance: int
    shard: int
    """Place in the optimizer instance."""


@dataclass(frozen=True)
class Layout:
    """The sizes of the parallel axes, and the ranks that each group holds."""

    world_size: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    instances: int = 1

    def __post_init__(self) -> None:
        for flag, size in self._sizes():
            if size < 1:
                raise ConfigError(f"{flag} {size}: must be at least 1")
        if self.world_size < 1:
            raise ConfigError(f"world size {self.world_size}: at least one process is needed")
        if self.world_size % self.model_size:
            raise ConfigError(self._world_message())
        if (self.dp * self.cp) % self.ep:
            raise ConfigError(self._expert_message())
        if self.expert_dp % self.instances:
            raise ConfigError(self._instances_message())

    @property
    def model_size(self) -> int:
        """Ranks that together hold and compute one replica: TP x CP x PP."""
        return self.tp * self.cp * self.pp

    @property
    def dp(self) -> int:
        return self.world_size // self.model_size

    @property
    def expert_dp(self) -> int:
        return self.dp * self.cp // self.ep

    @property
    def shard(self) -> int:
        """Ranks that divide the optimizer's state of dense parameters among them."""
        return self.dp * self.cp // self.instances

    def size(self, axis: str) -> int:
        """Ranks in each group of `axis`."""
        sizes = {"tp": self.tp, "cp": self.cp, "ep": self.ep, "dp": self.dp, "pp": self.pp, "replicate": self.instances}
        sizes |= {"dp_cp": self.dp * self.cp, "model": self.tp * self.pp, "world": self.world_size}
        sizes |= {"expert_dp": self.expert_dp, "shard": self.shard, "expert_shard": self.shard // self.ep}
        return sizes[axis] if axis in sizes else len(self.group_of(axis, 0))

    def first_groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Returns the first two groups of `axis` and the last rank's group, without making the others."""
        first = self.group_of(axis, 0)
        members = frozenset(first)
        second = next(rank for rank in range(self.world_size) if rank not in members)
        return first, self.group_of(axis, second), self.group_of(axis, self.world_size - 1)

    def coordinates(self, rank: int) -> Coordinates:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        shared = rank // self.tp % (self.cp * self.dp)  # cp and dp together, cp fastest
        return Coordinates(
            tp=rank % self.tp,
            cp=shared % self.cp,
            dp=shared // self.cp,
            pp=rank // (self.tp * self.cp * self.dp),
            ep=shared % self.ep,
            expert_dp=shared // self.ep,
            instance=shared // self.shard,
            shard=shared % self.shard,
        )

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups of `axis`, their members in order; every rank is in exactly one."""
        return _groups(self, axis)

    def group_of(self, axis: str, rank: int) -> tuple[int, ...]:
        """The group of `axis` that holds `rank`."""
        if axis not in AXES:
            raise ValueError(f"unknown axis {axis!r}; there are {', '.join(AXES)}")
        place, shared = self.coordinates(rank), self.cp * self.dp
        at = place.cp + self.cp * place.dp  # among the ranks of a stage and a tensor slice
        stages, slices, own = range(place.pp, place.pp + 1), range(place.tp, place.tp + 1), range(at, at + 1)
        start = place.instance * self.shard
        if axis in ("pp", "model", "world"):
            stages = range(self.pp)
        elif axis == "embedding" and place.pp in (0, self.pp - 1):
            stages = range(0, self.pp, max(1, self.pp - 1))
        if axis in ("tp", "model", "world"):
            slices = range(self.tp)
        own = {
            "cp": range(place.dp * self.cp, (place.dp + 1) * self.cp),
            "dp": range(place.cp, shared, self.cp),
            "ep": range(place.expert_dp * self.ep, (place.expert_dp + 1) * self.ep),
            "expert_dp": range(place.ep, shared, self.ep),
            "dp_cp": range(shared),
            "world": range(shared),
            "shard": range(start, start + self.shard),
            "expert_shard": range(start + place.ep, start + self.shard, self.ep),
            "replicate": range(place.shard, shared, self.shard),
        }.get(axis, own)
        return tuple(tp + self.tp * (one + shared * pp) for pp in stages for one in own for tp in slices)

    def pipeline_links(self) -> Iterator[tuple[str, dict[int, int]]]:
        """Yields (what, {sender: receiver}) of the links between neighbouring stages, also around the ends of the
        pipeline, in one order for all ranks. Activations go to the next stage, gradients to the previous one. Links of
        a round share no rank: every other stage sends, and the last of an odd number of stages has its own round."""
        pipelines, whole = self.groups("pp"), self.pp - self.pp % 2
        for what, step in (("activation", 1), ("gradient", -1)):
            for senders in (range(0, whole, 2), range(1, whole, 2), range(whole, self.pp)):
                if senders:
                    yield what, {ranks[s]: ranks[(s + step) % self.pp] for s in senders for ranks in pipelines}

    def _sizes(self) -> tuple[tuple[str, int], ...]:
        own = (TP_FLAG, self.tp), (CP_FLAG, self.cp), (PP_FLAG, self.pp)
        return (*own, (EP_FLAG, self.ep), (INSTANCES_FLAG, self.instances))

    def _world_message(self) -> str:
        given = [(flag, size) for flag, size in self._sizes() if size > 1 and flag not in (EP_FLAG, INSTANCES_FLAG)]
        product = " x ".join(f"{flag} {size}" for flag, size in given)
        worlds = " or ".join(str(n) for n in nearest_multiples(self.world_size, self.model_size))
        ways = [f"start {worlds} processes"]
        for flag, size in given:
            others = self.model_size // size
            if self.world_size % others == 0:
                fits = " or ".join(str(n) for n in nearest_divisors(self.world_size // others, size))
                ways.append(f"use {flag} {fits}")
        needs = f"{product} = {self.model_size}" if len(given) > 1 else product
        started = "1 process that was" if self.world_size == 1 else f"{self.world_size} processes that were"
        return f"{needs} does not divide the {started} started; {', or '.join(ways)}"

    def _expert_message(self) -> str:
        replicas = self.dp * self.cp
        fits = " or ".join(str(n) for n in nearest_divisors(replicas, self.ep))
        return (
            f"{EP_FLAG} {self.ep} does not divide the {replicas} ranks of data parallel {self.dp} x {CP_FLAG} "
            f"{self.cp}; use {EP_FLAG} {fits}"
        )

    def _instances_message(self) -> str:
        size, sizes = self.expert_dp, f"data parallel {self.dp}"
        if self.cp > 1:
            sizes += f" x {CP_FLAG} {self.cp}"
        if self.ep > 1:
            sizes += f" / {EP_FLAG} {self.ep}"
        sharing = "divide the same experts" if self.ep > 1 else "would divide the optimizer's state"
        fits = " or ".join(str(n) for n in nearest_divisors(size, self.instances))
        return (
            f"{INSTANCES_FLAG} {self.instances} does not divide the number of ranks that {sharing}, {size} ({sizes}); "
            f"use {INSTANCES_FLAG} {fits}"
        )


def nearest_divisors(number: int, size: int) -> tuple[int, ...]:
    """The largest divisor of `number` up to `size` and the smallest above it, as far as they exist."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    below = [d for d in divisors if d <= size]
    above = [d for d in divisors if d > size]
    return (*below[-1:], *above[:1])


def nearest_multiples(number: int, unit: int) -> tuple[int, ...]:
    """The multiples of `unit` next to `number`, below and above, without 0."""
    below = number // unit * unit
    return tuple(n for n in (below, below + unit) if n)


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """Rows of the vocabulary tables in memory: the smallest multiple of `divisible_by * tp` that holds `vocab_size`."""
    if vocab_size < 1:
        raise ConfigError(f"vocabulary size {vocab_size}: must be at least 1")
    if divisible_by < 1:
        raise ConfigError(f"--make-vocab-size-divisible-by {divisible_by}: must be at least 1")
    if tp < 1:
        raise ConfigError(f"{TP_FLAG} {tp}: must be at least 1")
    unit = divisible_by * tp
    return -(-vocab_size // unit) * unit


@lru_cache(maxsize=32)
def _groups(layout: Layout, axis: str) -> tuple[tuple[int, ...], ...]:
    groups: dict[int, tuple[int, ...]] = {}  # by member
    for rank in range(layout.world_size):
        if rank not in groups:
            groups.update(dict.fromkeys(group := layout.group_of(axis, rank), group))
    return tuple(dict.fromkeys(groups.values()))

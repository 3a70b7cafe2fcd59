"""Parallel layout: the ranks of each group. Pure arithmetic, no torch.

Ranks are numbered with tensor parallel fastest, then context, data and pipeline parallel (Megatron's order):

    rank = tp + TP * (cp + CP * (dp + DP * pp))

Expert parallelism is not a factor of the world size. It divides the CP x DP ranks of a pipeline stage and tensor slice.
With `j = cp + CP * dp`, the expert coordinate is `j % EP`, and `j // EP` numbers the replicas of each expert.

These CP x DP ranks form optimizer instances: equally large groups of consecutive `j` (Megatron's order). ZeRO shards
the optimizer's state over the ranks of an instance. Ranks with the same index in different instances hold the same
shard.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from math import isqrt

from megatron.errors import ConfigError

TP_FLAG = "--tensor-model-parallel-size"
CP_FLAG = "--context-parallel-size"
EP_FLAG = "--expert-model-parallel-size"
PP_FLAG = "--pipeline-model-parallel-size"
INSTANCES_FLAG = "--num-distributed-optimizer-instances"

PROCESSES = "processes"
"""Stands for the number of processes, where an error suggests another number of them."""

RANK_ORDER = "tp-cp-dp-pp"
"""Order of the axes in the rank number. The first one varies fastest."""

_MULTIPLES = 100  # number of multiples on each side that a message tries

AXES = (
    *("tp", "cp", "ep", "dp", "pp", "dp_cp", "expert_dp", "shard", "expert_shard", "replicate"),
    *("embedding", "model", "world"),
)
"""All axes that have groups of ranks.

Gradients of dense parameters are reduced over `dp_cp`, gradients of experts over `expert_dp`. The groups `shard` and
`expert_shard` are the parts of these groups within one optimizer instance. A group of `replicate` has one rank of each
instance, with the same shard. With one instance, `shard` equals `dp_cp`, `expert_shard` equals `expert_dp`, and each
group of `replicate` is a single rank. A group of `embedding` joins the first and the last pipeline stage, because both
hold the weight of a tied head. A group of `model` (tp x pp) holds one replica of the model. The group of `world` is all
ranks.
"""


@dataclass(frozen=True)
class Way:
    """Alternative sizes of one setting, as an error message suggests them."""

    words: str
    """Text with {} for the sizes, such as "use --x {}"."""
    setting: str
    """The flag, or PROCESSES."""
    asked: int
    sizes: Sequence[int]
    """All sizes that this check accepts, ascending."""

    def told(self, passes: Callable[[str, int], bool]) -> str:
        """Returns `words` with the nearest sizes below and above `asked` for which `passes` is true; "" if none is."""
        below = [n for n in reversed(self.sizes) if n < self.asked]
        above = [n for n in self.sizes if n > self.asked]
        near = [next((n for n in side if passes(self.setting, n)), None) for side in (below, above)]
        fits = " or ".join(str(n) for n in near if n is not None)
        return self.words.format(fits) if fits else ""


class SizesError(ConfigError):
    """An error that suggests sizes. `text` omits sizes that other checks reject. A way may also be a fixed text."""

    def __init__(self, reason: str, *ways: Way | str) -> None:
        self._reason, self._ways = reason, ways
        super().__init__(self.text(lambda setting, size: True))

    def text(self, passes: Callable[[str, int], bool]) -> str:
        told = [way if isinstance(way, str) else way.told(passes) for way in self._ways]
        ways = ", or ".join(filter(None, told)) or "no other value of one setting passes all checks: change several"
        return f"{self._reason}; {ways}"

    def planned(self) -> "SizesError":
        """Returns this error for the ranks of --dry-run-ranks, which no launcher has started."""
        reason, ways = self._reason, list(self._ways)
        for index, way in enumerate(ways):
            if isinstance(way, Way) and way.setting == PROCESSES:
                reason = reason.replace(f"the number of processes, {way.asked},", f"--dry-run-ranks {way.asked}")
                ways[index] = replace(way, words="use --dry-run-ranks {}")
        return SizesError(reason, *ways)


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
    """Index of the rank within its optimizer instance."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel axes, and the ranks of each group."""

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
            raise self._world_error()
        if (self.dp * self.cp) % self.ep:
            raise self._expert_error()
        if self.expert_dp % self.instances:
            raise self._instances_error()

    @property
    def model_size(self) -> int:
        """Number of ranks that together hold and compute one model replica: TP x CP x PP."""
        return self.tp * self.cp * self.pp

    @property
    def dp(self) -> int:
        return self.world_size // self.model_size

    @property
    def expert_dp(self) -> int:
        return self.dp * self.cp // self.ep

    @property
    def shard(self) -> int:
        """Number of ranks over which ZeRO shards the optimizer's state of dense parameters."""
        return self.dp * self.cp // self.instances

    def size(self, axis: str) -> int:
        """Returns the number of ranks in each group of `axis`."""
        sizes = {"tp": self.tp, "cp": self.cp, "ep": self.ep, "dp": self.dp, "pp": self.pp, "replicate": self.instances}
        sizes |= {"dp_cp": self.dp * self.cp, "model": self.tp * self.pp, "world": self.world_size}
        sizes |= {"expert_dp": self.expert_dp, "shard": self.shard, "expert_shard": self.shard // self.ep}
        return sizes[axis] if axis in sizes else len(self.group_of(axis, 0))

    def first_groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Returns the first two groups of `axis` and the last rank's group, without computing the others."""
        first = self.group_of(axis, 0)
        members = frozenset(first)
        second = next(rank for rank in range(self.world_size) if rank not in members)
        return first, self.group_of(axis, second), self.group_of(axis, self.world_size - 1)

    def coordinates(self, rank: int) -> Coordinates:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size} ranks, which are numbered from 0")
        shared = rank // self.tp % (self.cp * self.dp)  # cp + CP * dp
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
        """Returns all groups of `axis`, each in ascending order. Every rank is in exactly one group."""
        return _groups(self, axis)

    def group_of(self, axis: str, rank: int) -> tuple[int, ...]:
        """Returns the group of `axis` that contains `rank`."""
        if axis not in AXES:
            raise ValueError(f"unknown axis {axis!r}; use one of {', '.join(AXES)}")
        place, shared = self.coordinates(rank), self.cp * self.dp
        at = place.cp + self.cp * place.dp  # index among the CP x DP ranks of a stage and tensor slice
        stages, own = range(place.pp, place.pp + 1), range(at, at + 1)
        start = place.instance * self.shard
        if axis in ("pp", "model", "world"):
            stages = range(self.pp)
        elif axis == "embedding" and place.pp in (0, self.pp - 1):
            stages = range(0, self.pp, max(1, self.pp - 1))
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
        # All slices of a stage are consecutive ranks. Ranges make the groups of 100,000 ranks fast.
        first, step = (0, 1) if axis in ("tp", "model", "world") else (place.tp, own.step * self.tp)
        ends = ((self.tp * (own.start + shared * pp), self.tp * (own.stop + shared * pp)) for pp in stages)
        return tuple(chain.from_iterable(range(start + first, stop, step) for start, stop in ends))

    def pipeline_links(self) -> Iterator[tuple[str, dict[int, int]]]:
        """Yields rounds (what, {sender: receiver}) of links between neighbouring stages, in one order for all ranks.
        Activations go to the next stage, gradients to the previous one; the last stage is followed by the first. A rank
        has one link per round: every second stage sends, and the last of an odd number of stages has its own round."""
        pipelines, whole = self.groups("pp"), self.pp - self.pp % 2
        for what, step in (("activation", 1), ("gradient", -1)):
            for senders in (range(0, whole, 2), range(1, whole, 2), range(whole, self.pp)):
                if senders:
                    yield what, {ranks[s]: ranks[(s + step) % self.pp] for s in senders for ranks in pipelines}

    def _sizes(self) -> tuple[tuple[str, int], ...]:
        own = (TP_FLAG, self.tp), (CP_FLAG, self.cp), (PP_FLAG, self.pp)
        return (*own, (EP_FLAG, self.ep), (INSTANCES_FLAG, self.instances))

    def _world_error(self) -> SizesError:
        given = [(flag, size) for flag, size in self._sizes() if size > 1 and flag not in (EP_FLAG, INSTANCES_FLAG)]
        product = " x ".join(f"{flag} {size}" for flag, size in given)
        worlds = multiples_around(self.world_size, self.model_size)
        ways = [Way("start {} processes", PROCESSES, self.world_size, worlds)]
        for flag, size in given:
            others = self.model_size // size
            if self.world_size % others == 0:
                ways.append(Way(f"use {flag} {{}}", flag, size, divisors(self.world_size // others)))
        needs = f"{product} = {self.model_size}" if len(given) > 1 else product
        reason = f"the number of processes, {self.world_size}, is not divisible by {self.model_size}"
        return SizesError(f"{needs}: {reason}", *ways)

    def _expert_error(self) -> SizesError:
        replicas = self.dp * self.cp
        return SizesError(
            f"{EP_FLAG} {self.ep}: the {replicas} ranks (data parallel {self.dp} x {CP_FLAG} {self.cp}) are not "
            f"divisible into groups of {self.ep}",
            Way(f"use {EP_FLAG} {{}}", EP_FLAG, self.ep, divisors(replicas)),
        )

    def _instances_error(self) -> SizesError:
        size, sizes = self.expert_dp, f"data parallel {self.dp}"
        if self.cp > 1:
            sizes += f" x {CP_FLAG} {self.cp}"
        if self.ep > 1:
            sizes += f" / {EP_FLAG} {self.ep}"
        sharing = "hold the same experts" if self.ep > 1 else "shard the optimizer's state"
        return SizesError(
            f"{INSTANCES_FLAG} {self.instances}: the number of ranks that {sharing}, {size} ({sizes}), is not "
            f"divisible by {self.instances}",
            Way(f"use {INSTANCES_FLAG} {{}}", INSTANCES_FLAG, self.instances, divisors(size)),
        )


def divisors(number: int) -> list[int]:
    """Returns all divisors, ascending."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest_divisors(number: int, size: int) -> tuple[int, ...]:
    """Returns the largest divisor of `number` up to `size` and the smallest one above `size`, if they exist."""
    below = [d for d in divisors(number) if d <= size]
    above = [d for d in divisors(number) if d > size]
    return (*below[-1:], *above[:1])


def multiples_around(number: int, unit: int) -> range:
    """Returns multiples of `unit` near `number`, without 0: more than enough to find one that fits other sizes."""
    below = number // unit * unit
    return range(max(unit, below - _MULTIPLES * unit), below + _MULTIPLES * unit, unit)


def nearest_multiples(number: int, unit: int) -> tuple[int, ...]:
    """Returns the nearest multiples of `unit` at or below `number` and above it, without 0."""
    below = number // unit * unit
    return tuple(n for n in (below, below + unit) if n)


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """Returns the rows of the embedding table: the smallest multiple of `divisible_by * tp` that is >= `vocab_size`."""
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
    groups: list[tuple[int, ...]] = []
    placed: set[int] = set()
    for rank in range(layout.world_size):
        if rank not in placed:
            groups.append(layout.group_of(axis, rank))
            placed.update(groups[-1])
    return tuple(groups)

"""Barrier in the store: no rank continues before all have arrived. Ranks do not wait in a collective, so the wait may
last as long as the slowest rank needs. Every 30 seconds one rank prints which ranks are missing."""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from megatron.distributed.identity import Identity
from megatron.distributed.launch import LaunchInfo
from megatron.distributed.store_values import Unreadable, parse_ranks, printable_start
from megatron.errors import ConfigError, HangError
from megatron.utils.log import print_line

TOLD_EVERY = 30.0  # seconds
_OTHERS_READ_WITHIN = 3.0
_ALL_HERE, _UNLIKE, _LATE = "all ranks are here", "unlike: ", "late: "
_OUTCOME_CHARACTERS = 4000


@dataclass(frozen=True)
class Patience:
    """Time that a rank waits for the others, in rounds; after each round a message may be printed."""

    timeout: timedelta
    told_every: float = TOLD_EVERY
    started: float = field(default_factory=time.monotonic)

    @property
    def waited(self) -> float:
        return time.monotonic() - self.started

    @property
    def limit(self) -> str:
        return "" if self.timeout == timedelta.max else f" (limit {self.timeout.total_seconds():.0f} s)"

    def rounds(self) -> Iterator[float]:
        """Seconds to wait in each round, until the time is up."""
        while (left := self.timeout.total_seconds() - self.waited) > 0:
            yield min(self.told_every, left)


def wait_for_all(
    store: dist.Store, identity: Identity, info: LaunchInfo, patience: Patience, *, did: str = "come"
) -> None:
    """Returns when all ranks have called it with equal identities. `did`: past participle, as in "rank 3 has not come".
    The work of a rank does not grow with the number of ranks: the last one to arrive informs the others. In every
    round only the first one whose wait ends reads the list of arrivals.
    """
    if store.add(f"came_{info.rank}", 1) > 1:
        raise ConfigError(
            f"--master-port {info.master_port}: another process has already joined as rank {info.rank}; choose "
            "another port if two jobs use this one, and start every rank once"
        )
    store.append("came", f"{info.rank} ")  # type: ignore[attr-defined]  # torch's stubs lack it
    unlike = identity.unlike_first(store)
    if isinstance(unlike, Unreadable):
        raise _of_a_stranger(info, unlike)
    if unlike is not None:
        store.compare_set("outcome", "", _UNLIKE + unlike)
    elif store.add("number", 1) == info.world_size:
        store.set("outcome", _ALL_HERE)
    for number, seconds in enumerate(patience.rounds()):
        try:
            store.wait(["outcome"], timedelta(seconds=seconds))
            break
        except dist.DistStoreError:  # not yet
            if store.add(f"told_{number}", 1) == 1:
                say(info, patience, _missing(store, info, did))
    # The first rank whose time is up decides for all, so that all ranks end for the same reason.
    mine = "" if store.check(["outcome"]) else f"{_LATE}{never_met(info, patience, _missing(store, info, did))}"
    found = bytes(store.compare_set("outcome", "", mine) if mine else store.get("outcome"))
    outcome = printable_start(found, _OUTCOME_CHARACTERS)
    if outcome == _ALL_HERE:
        return
    if info.keeps_store:
        time.sleep(_OTHERS_READ_WITHIN)
    if outcome.startswith(_UNLIKE):
        raise identity.subject.error(outcome.removeprefix(_UNLIKE))
    if outcome.startswith(_LATE):
        raise HangError(outcome.removeprefix(_LATE))
    raise _of_a_stranger(info, Unreadable(found, "not the outcome of a meeting"))


def _of_a_stranger(info: LaunchInfo, found: Unreadable) -> ConfigError:
    return ConfigError(
        f"--master-port {info.master_port}: the ranks' store holds {found}, which no rank of this run writes. Choose "
        "another port if another program uses this one, and allow only the machines of this run to reach it"
    )


def say(info: LaunchInfo, patience: Patience, missing: str) -> None:
    waited = f"{patience.waited:.0f} s{patience.limit}"
    print_line(f"rank {info.rank} has waited for the others for {waited}: {missing}", sys.stderr)


def never_met(info: LaunchInfo, patience: Patience, missing: str) -> HangError:
    return HangError(
        f"--distributed-timeout-minutes {patience.timeout.total_seconds() / 60:g}: the ranks did not all meet at "
        f"{info.store_host}:{info.master_port} (attempt {info.attempt}): {missing}; see the output of the missing "
        "ranks, or raise the timeout"
    )


def _missing(store: dist.Store, info: LaunchInfo, did: str) -> str:
    came = parse_ranks(store.get("came"), info.world_size)
    absent = [rank for rank in range(info.world_size) if rank not in came]
    if not absent:
        return f"all have {did}, but their number in the store is wrong: another program writes there"
    verb = "s {} have" if len(absent) > 1 else " {} has"
    return f"rank{verb.format(spans(absent))} not {did} ({len(came)} of {info.world_size} have)"


def spans(ranks: Sequence[int]) -> str:
    """Formats numbers as text such as "0, 8-15": usually all ranks of some machines are missing."""
    among = set(ranks)
    starts = [rank for rank in ranks if rank - 1 not in among]
    ends = [rank for rank in ranks if rank + 1 not in among]
    spans = [f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends)]
    return ", ".join(spans[:20]) + (f", ... ({len(ranks)} in all)" if len(spans) > 20 else "")

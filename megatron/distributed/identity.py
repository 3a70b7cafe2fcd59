"""What must be the same on all ranks before they may work together, compared when they meet.

Ranks with other settings or other code hang in their first collective, or train something that nobody asked for. The
first rank to come publishes what it was started with; whoever comes with something else ends the run, and says what.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

_MOST_NAMED = 5
_PUBLISHED_WITHIN = timedelta(seconds=30)


@dataclass(frozen=True)
class Identity:
    """Of a rank: its number, and values by name (settings as on a command line, hashes of code)."""

    rank: int
    values: Mapping[str, str]

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(dict(self.values), sort_keys=True).encode()).hexdigest()

    def unlike_first(self, store: dist.Store) -> str | None:
        """How this rank differs from the first that came; None if it does not. One small request, unless it does."""
        mine = f"{self.digest} {self.rank}"
        first = store.compare_set("identity", "", mine).decode()
        if first == mine:
            store.set("identity_values", json.dumps([self.rank, _host(), dict(self.values)]))
            return None
        if first.partition(" ")[0] == self.digest:
            return None
        store.wait(["identity_values"], _PUBLISHED_WITHIN)
        rank, host, values = json.loads(store.get("identity_values"))
        return difference(values, self.values, theirs=f"rank {rank} ({host})", ours=f"rank {self.rank} ({_host()})")


def _host() -> str:
    return socket.gethostname()


def difference(first: Mapping[str, str], other: Mapping[str, str], *, theirs: str, ours: str) -> str:
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    told = [f"{name} is {first.get(name, 'unset')} there and {other.get(name, 'unset')} here" for name in names]
    more = f", and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return (
        f"{ours} was started with other settings or code than {theirs}: {', '.join(told[:_MOST_NAMED])}{more}; start "
        "all ranks with one command and one version of the code"
    )

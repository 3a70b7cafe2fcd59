"""Compares the settings, code and data of all ranks when they meet.

Ranks with different settings, code or data hang in their first collective, or silently train something else. The first
rank to arrive publishes its values. A rank with different ones ends the run and reports the difference.
"""

import hashlib
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from megatron.distributed.store_values import Unreadable, parse_first_rank, parse_identity
from megatron.errors import ConfigError, DataError, MegatronError

_MOST_NAMED = 5
_PUBLISHED_WITHIN = timedelta(seconds=30)


@dataclass(frozen=True, kw_only=True)
class MismatchWording:
    """Wording of a mismatch message."""

    verb: str
    way_out: str
    error: type[MegatronError]


STARTED_WITH = MismatchWording(
    verb="was started with other settings or code than",
    way_out="start all ranks with one command and one version of the code",
    error=ConfigError,
)
DATA = MismatchWording(
    verb="reads other data than",
    way_out="copy the files (.bin, .idx and their record) of one machine to the others, and give the same weights",
    error=DataError,
)


@dataclass(frozen=True)
class Identity:
    """Compared values of one rank by name: settings as on a command line, hashes of code."""

    rank: int
    values: Mapping[str, str]
    shown: Mapping[str, str] = field(default_factory=dict)
    """Texts that replace values in messages, such as a path instead of a content hash."""
    subject: MismatchWording = STARTED_WITH

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(dict(self.values), sort_keys=True).encode()).hexdigest()

    def unlike_first(self, store: dist.Store) -> str | Unreadable | None:
        """Describes how this rank differs from the first one; None if it does not. Equal ranks need one request."""
        mine = f"{self.digest} {self.rank}"
        first = bytes(store.compare_set("identity", "", mine))
        if first == mine.encode():
            store.set("identity_values", json.dumps([self.rank, _host(), dict(self.values), dict(self.shown)]))
            return None
        digest = parse_identity(first)
        if isinstance(digest, Unreadable) or digest == self.digest:
            return digest if isinstance(digest, Unreadable) else None
        store.wait(["identity_values"], _PUBLISHED_WITHIN)
        other = parse_first_rank(store.get("identity_values"))
        if isinstance(other, Unreadable):
            return other
        theirs = f"rank {other.rank} ({other.host})"
        return self.difference(Identity(other.rank, other.values, other.shown), theirs, f"rank {self.rank} ({_host()})")

    def difference(self, other: "Identity", theirs: str, ours: str) -> str:
        names = [name for name in {**other.values, **self.values} if other.values.get(name) != self.values.get(name)]
        told = [
            f"{name} is {other.told(name)} on rank {other.rank} and {self.told(name)} on rank {self.rank}"
            for name in names
        ]
        more = f"; and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        listed = "; ".join(told[:_MOST_NAMED])
        return f"{ours} {self.subject.verb} {theirs}: {listed}{more}; {self.subject.way_out}"

    def told(self, name: str) -> str:
        return self.shown.get(name, self.values.get(name, "unset"))


def _host() -> str:
    return socket.gethostname()

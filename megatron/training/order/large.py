"""Makes a small model that is recorded on a CPU communicate like a large one on accelerators."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

from megatron.checkpoint import parts, storage
from megatron.data_parallel import GradBuffers
from megatron.engine import Engine, build

_BUCKET = 4096
"""Elements: several buckets of gradients, as a large model has."""
_collect = parts.collect


@contextmanager
def as_large_on_accelerators() -> Iterator[None]:
    """Within the context steps are asynchronous and gradients travel in several buckets. The ranks that exist only in
    the recording need no disk space and write no files."""
    with (
        patch.object(Engine, "asynchronous", True),
        patch.object(build, "GradBuffers", partial(GradBuffers, bucket_size=_BUCKET)),
        patch.object(storage, "free_bytes", lambda path: sys.maxsize),
        patch.object(parts, "collect", _of_the_first),
    ):
        yield


def _of_the_first(folder: Path, ranks: object) -> list[parts.Part]:
    """What the first rank has written, without shares: the other ranks have written nothing here."""
    return [replace(part, shares={}) for part in _collect(folder, [0])]

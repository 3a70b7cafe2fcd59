"""Makes a small model that is recorded on a CPU communicate like a large one on accelerators."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from threading import Event
from unittest.mock import patch

from megatron.checkpoint import found_step, save, storage
from megatron.checkpoint.content import Part, RankContent
from megatron.data_parallel import BucketStore
from megatron.engine import Engine
from megatron.engine import assembly as build
from megatron.utils.task import Task

_BUCKET = 4096
"""Elements of a bucket, small enough for several buckets of gradients, as in a large model."""
_collect, _write_files = save.collect_notes, save.Save.write


@contextmanager
def as_large_on_accelerators() -> Iterator[None]:
    """Makes steps asynchronous, and reduces gradients in several buckets. Other ranks exist only in the
    recording: they need no disk space, write no files and make no directory for this rank. A background task has always
    ended when the training polls it, on all ranks. All ranks load the same checkpoint, so its manifest is read once."""
    manifest = cache(found_step.verified_manifest)
    with (
        patch.object(Engine, "asynchronous", True),
        patch.object(build, "BucketStore", partial(BucketStore, bucket_size=_BUCKET)),
        patch.object(storage, "free_bytes", lambda path: sys.maxsize),
        patch.object(save, "collect_notes", _of_the_first),
        patch.object(save.Save, "write", _write),
        patch.object(Task, "ended", property(_ended)),
        patch.object(found_step, "verified_manifest", manifest),
    ):
        yield


def _of_the_first(folder: Path, ranks: Iterable[int]) -> list[Part]:
    """Returns the note of the first rank, without shares, because the other ranks have written nothing here."""
    return [replace(part, shares={}) for part in _collect(folder, [min(ranks)])]


def _write(one: save.Save, content: RankContent, stop: Event | None = None) -> None:
    one._temporary.mkdir(parents=True, exist_ok=True)
    _write_files(one, content, stop)


def _ended(task: Task) -> bool:
    task.wait()
    return True

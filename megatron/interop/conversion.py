"""Operations that all conversions share: read one tensor at a time, with progress, and write a temporary directory that
is renamed when it is complete."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint import paths, storage
from megatron.checkpoint.content import check_finite
from megatron.checkpoint.lock import DirectoryLock
from megatron.checkpoint.run_state import RunHistory, SavedInfo, TrainState
from megatron.checkpoint.save import save_checkpoint
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import ConfigError
from megatron.layout import Layout
from megatron.torch_files.writer import Deferred
from megatron.utils import durable

Show = Callable[[int, int], object]
"""Called with (bytes done, bytes in total)."""


def no_progress(done: int, total: int) -> None:
    """No-op: shows no progress."""


@dataclass
class Reading:
    """Makes deferred tensors: a conversion reads each only when it writes it. `show` reports the progress."""

    show: Show
    total: int = 0
    done: int = 0

    def tensor(self, name: str, shape: Iterable[int], dtype: torch.dtype, read: Callable[[], Tensor]) -> Deferred:
        shape = tuple(shape)
        self.total += prod(shape) * dtype.itemsize

        def counted() -> Tensor:
            found = read().view(shape)
            check_finite(name, found)
            self.done += found.nbytes
            self.show(self.done, self.total)
            return found

        return Deferred.of(shape, dtype, counted)


def save_native(
    save: Path,
    state: TrainState,
    *,
    run_id: str,
    known_as: Path,
    release: bool,
    save_tokenizer: Callable[[Path], object] | None = None,
) -> SavedInfo:
    """Saves a converted state as a run of one process would."""
    with closing(RunHistory(run_id)) as history:
        return save_checkpoint(
            save,
            state,
            parallel=ParallelState.build(Layout(1), 0),
            save_tokenizer=save_tokenizer,
            history=history,
            release=release,
            known_as=known_as,
        )


def refuse_what_must_stay(load: Path, save: Path) -> None:
    """Raises if replacing --save would delete what --load reads."""
    source, target = load.resolve(), save.resolve()
    within = target.parent == source and (paths.step_of(save.name) is not None or save.name == paths.RELEASE)
    if source == target or target in source.parents or within:
        raise ConfigError(
            f"--overwrite: replacing --save {save} would delete files of --load {load}; give another --save"
        )
    if save.is_symlink() or (save.exists() and not save.is_dir()):
        raise ConfigError(f"--overwrite: --save {save} is a file or a symbolic link; give another --save")


@contextmanager
def written_aside(out: Path, doing: str) -> Iterator[Path]:
    """Yields a temporary directory, and renames it to `out` when it is complete. An existing `out` stays until then."""
    temporary = out.with_name(f"{paths.TEMPORARY}{out.name}")
    in_use = DirectoryLock.acquire(out, "conversion") if (out / paths.LOCK).exists() else None
    try:
        with storage.storage_errors(doing, temporary):
            if temporary.exists():
                shutil.rmtree(temporary)
            durable.make_directory(temporary)
            try:
                yield temporary
                durable.fsync_tree(temporary)
                _take_place(temporary, out)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    finally:
        if in_use is not None:
            in_use.release()


def _take_place(temporary: Path, out: Path) -> None:
    if not out.exists():
        durable.rename(temporary, out)
        return
    old = out.with_name(f"{paths.TRASH}{out.name}")
    if old.exists():
        shutil.rmtree(old)
    durable.rename(out, old)
    try:
        durable.rename(temporary, out)
    except BaseException:
        old.rename(out)
        raise
    shutil.rmtree(old)

"""Checks for --dry-run that a run could write to its output paths. Leaves no file."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

from megatron.config import RunConfig
from megatron.errors import ConfigError, StorageError
from megatron.utils.device import human_bytes


def check_output_places(config: RunConfig) -> None:
    """Raises a StorageError for --save, as a launch does, and a ConfigError for the other places."""
    for flag, given, folder in _places(config):
        nearest = nearest_folder(folder)
        try:
            with TemporaryFile(dir=nearest):
                pass
        except OSError as error:
            kind = StorageError if flag == "--save" else ConfigError
            raise kind(f"{flag} {given}: cannot write in {nearest} ({error.strerror}); name another place") from None


def _places(config: RunConfig) -> Iterator[tuple[str, str, Path]]:
    """Yields (flag, its value, folder that must be writable). Folders on each machine's own disk are not checked."""
    trains = not config.training.skip_train
    for flag, folder in (
        ("--save", config.checkpoint.save if trains else None),
        ("--non-persistent-global-ckpt-dir", config.checkpoint.non_persistent_global_ckpt_dir if trains else None),
        ("--tensorboard-dir", config.logging.tensorboard_dir),
        ("--profile-dir", config.profile.profile_dir if config.profile.profile else None),
        ("--pipeline-trace", config.parallel.pipeline_trace),
    ):
        if folder is not None:
            yield flag, folder, Path(folder)
    for flag, file in (
        ("--metrics-jsonl", config.logging.metrics_jsonl),
        ("--data-table-path", config.data.data_table_path),
    ):
        if file is not None:
            yield flag, file, Path(file).parent


def nearest_folder(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def space_for(step_bytes: float, save: str) -> str:
    """Text that compares the size of one checkpoint with the free space."""
    folder = nearest_folder(Path(save))
    free = shutil.disk_usage(folder).free
    few = "; too little space for one checkpoint" if step_bytes > free else ""
    return f"; {human_bytes(step_bytes)} each (estimate), {human_bytes(free)} free in {folder}{few}"

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
    """(flag, its value, folder that must be written to). A folder on each machine's own disk is not looked at."""
    settings, logging = config.checkpoint, config.logging
    if not config.training.skip_train:
        for flag, folder in (
            ("--save", settings.save),
            ("--non-persistent-global-ckpt-dir", settings.non_persistent_global_ckpt_dir),
        ):
            if folder is not None:
                yield flag, folder, Path(folder)
    if logging.tensorboard_dir is not None:
        yield "--tensorboard-dir", logging.tensorboard_dir, Path(logging.tensorboard_dir)
    if logging.metrics_jsonl is not None:
        yield "--metrics-jsonl", logging.metrics_jsonl, Path(logging.metrics_jsonl).parent


def nearest_folder(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def space_for(step_bytes: float, save: str) -> str:
    """Text that compares the size of one checkpoint with the free space."""
    folder = nearest_folder(Path(save))
    free = shutil.disk_usage(folder).free
    few = "; too little space for one" if step_bytes > free else ""
    return f"; {human_bytes(step_bytes)} each (estimate), {human_bytes(free)} free in {folder}{few}"

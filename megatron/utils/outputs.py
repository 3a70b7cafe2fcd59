"""Files of results: checked before the work, written whole or not at all."""

import os
from collections.abc import Iterable
from pathlib import Path

from megatron.errors import ConfigError
from megatron.utils.durable import write_atomically, writing


def check_output(path: Path) -> None:
    """Raises before the work if the results cannot be written."""
    if path.is_dir():
        raise ConfigError(f"--output {path}: is a directory; give a file's name")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no directory {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--output {path}: {path.parent} cannot be written to; choose another directory")


def write_output(path: Path, lines: Iterable[str]) -> None:
    with writing(path):
        write_atomically(path, [f"{line}\n".encode() for line in lines])

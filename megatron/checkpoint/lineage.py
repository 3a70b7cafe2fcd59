"""Lineage of a non-persistent step: the save directory of its run, and the step there that the run continued from.

A load takes only non-persistent steps with its own lineage. Other steps there may be from another run, from a save
directory that was emptied or copied since, or from iterations before which the run was rewound.
"""

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import paths
from megatron.errors import CheckpointError
from megatron.utils import durable


@dataclass(frozen=True)
class Line:
    save: str
    """Id of the save directory (`name_of`)."""
    base: int | None
    """Step in that directory that the run saved or loaded last; None if there was no such step."""


def name_of(save: Path) -> str | None:
    """Id of a save directory at its path; a moved or copied directory has another id. None if the directory has no id:
    then no non-persistent step belongs to it."""
    try:
        with open(save / paths.LINEAGE, "rb") as file:
            token = file.read(64)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(
            f"{save / paths.LINEAGE} cannot be read ({error.strerror}); it identifies this run's non-persistent "
            "checkpoints: make it readable, or remove --non-persistent-save-interval"
        ) from error
    return hashlib.sha256(token + b"\0" + str(save.resolve()).encode()).hexdigest()[:16]


def named(save: Path) -> str:
    """Returns `name_of` of a directory. Gives the directory a permanent id first if it has none."""
    if name_of(save) is None:
        durable.write_once(save / paths.LINEAGE, [secrets.token_hex(16).encode()])
    name = name_of(save)
    assert name is not None
    return name

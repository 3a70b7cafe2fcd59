"""Lineage of a non-persistent step: the save directory of its run, and the step there that the run continued from.

A load takes only steps of its own lineage. Other runs may have left steps in the same place, the save directory may
have been emptied or copied since, and the run may have been rewound past a step.
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
    """The step there that the run saved or loaded last; None if it started afresh and had saved none."""


def name_of(save: Path) -> str | None:
    """Id of this directory at this place. None if it has none, so that no non-persistent step belongs to it."""
    try:
        with open(save / paths.LINEAGE, "rb") as file:
            token = file.read(64)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(
            f"{save / paths.LINEAGE} cannot be read ({error.strerror}); it identifies this run's non-persistent "
            "checkpoints: make it readable, or leave out --non-persistent-save-interval"
        ) from error
    return hashlib.sha256(token + b"\0" + str(save.resolve()).encode()).hexdigest()[:16]


def named(save: Path) -> str:
    """Returns `name_of`, after giving the directory a permanent id if it has none."""
    if name_of(save) is None:
        durable.write_once(save / paths.LINEAGE, [secrets.token_hex(16).encode()])
    name = name_of(save)
    assert name is not None
    return name

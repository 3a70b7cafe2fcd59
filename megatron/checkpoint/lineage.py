"""Which run a non-persistent step belongs to: the one of a save directory, and there the one that went on from a step.

So a step that another run left in the same place, one of a save directory that was emptied or copied since, or one that
was rewound past, is never taken for the newest.
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
    """The save directory, as `name_of` has it."""
    base: int | None
    """Its step that the run had saved or loaded last; None: it started afresh, and had saved none."""


def name_of(save: Path) -> str | None:
    """The name of this directory at this place; None: it has none, so no non-persistent step belongs to it."""
    try:
        with open(save / paths.LINEAGE, "rb") as file:
            token = file.read(64)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(
            f"{save / paths.LINEAGE} cannot be read ({error.strerror}), which says which non-persistent checkpoints "
            "are this run's: make it readable, or leave out --non-persistent-save-interval"
        ) from error
    return hashlib.sha256(token + b"\0" + str(save.resolve()).encode()).hexdigest()[:16]


def named(save: Path) -> str:
    """As `name_of`, but a directory without a name is given one, which it then keeps."""
    if name_of(save) is None:
        durable.write_once(save / paths.LINEAGE, [secrets.token_hex(16).encode()])
    name = name_of(save)
    assert name is not None
    return name

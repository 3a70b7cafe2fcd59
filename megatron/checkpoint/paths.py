"""File names of a checkpoint directory, and checks that they stay inside it."""

import os
import re
import stat
from dataclasses import dataclass
from os.path import lexists
from pathlib import Path, PurePosixPath

from megatron.errors import CheckpointError
from megatron.utils.durable import write_atomically

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
SHARE = "share.json"
LOCK = ".lock"
LINEAGE = ".lineage"
NON_PERSISTENT = "non_persistent"
RELEASE = "release"
MODEL_FILE = "model_optim_rng.pt"
TOKENIZER = "tokenizer"
TEMPORARY, TRASH = ".tmp-", ".trash-"
BAD, ABANDONED = "bad-", "abandoned-"  # renamed steps, which `ls` shows
_LONGEST_PATH, _LONGEST_NAME = 2000, 255  # characters below a step, bytes of a name: limits of file systems
SET_ASIDE = (BAD, ABANDONED, ".bad-", ".abandoned-")  # the last two are of earlier versions

_STEP = re.compile(r"iter_(\d{7,})")
_TRACKER_BYTES = 64


def step_name(step: int) -> str:
    return f"iter_{step:07d}"


def step_directory(directory: Path, step: int) -> Path:
    return directory / step_name(step)


def unfinished(directory: Path, name: str, run_id: str) -> Path:
    """Directory in which a run writes the step `name` until it is committed."""
    return directory / f"{TEMPORARY}{name}.{run_id}"


def step_of(name: str) -> int | None:
    """Returns the step of a directory name; None for any other name, such as a temporary or a renamed directory's."""
    match = _STEP.fullmatch(name)
    if match is None or step_name(int(match[1])) != name:
        return None
    return int(match[1])


def list_steps(directory: Path) -> list[int]:
    """The steps of all committed directories, newest first, whether valid or not."""
    if not directory.is_dir():
        return []
    steps = (step_of(entry.name) for entry in directory.iterdir() if is_plain_directory(entry))
    return sorted((step for step in steps if step is not None), reverse=True)


def is_plain_directory(path: Path) -> bool:
    """Returns True for a directory, but not for a symbolic link to one, whose target may be anywhere and may change."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def is_plain_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def holds_nothing(directory: Path) -> bool:
    """True if a run may start fresh here: there is no tracker, no step and no release."""
    if not directory.exists():
        return True
    names = (directory / TRACKER, directory / RELEASE)
    return not any(lexists(name) for name in names) and not any(
        _STEP.fullmatch(entry.name) for entry in directory.iterdir()
    )


@dataclass(frozen=True)
class Tracker:
    """The content of the tracker file: a step, `release`, or the problem with it."""

    step: int | None = None
    release: bool = False
    problem: str | None = None


def read_tracker(directory: Path) -> Tracker:
    path = directory / TRACKER
    if not lexists(path):
        return Tracker(problem=f"{path} is missing")
    if not is_plain_file(path):
        return Tracker(problem=f"{path} is not a plain file")
    try:
        with open(path, "rb") as file:
            raw = file.read(_TRACKER_BYTES + 1)
    except OSError as error:
        return Tracker(problem=f"{path} cannot be read ({error.strerror})")
    text = raw.decode("ascii", errors="replace").strip()
    if text == RELEASE:
        return Tracker(release=True)
    if len(raw) > _TRACKER_BYTES or re.fullmatch(r"[0-9]{1,15}", text) is None:
        return Tracker(problem=f"{path} holds {text[:20]!r}, not a step")
    return Tracker(step=int(text))


def write_tracker(directory: Path, text: str) -> None:
    write_atomically(directory / TRACKER, [text.encode("ascii")])


def member(root: Path, relative: str) -> Path:
    """Returns the path that a manifest gives for a file. Raises if the name leads outside of the step's directory, is
    too long, or has a symbolic link in its path."""
    pure = PurePosixPath(relative)
    strange = pure.is_absolute() or not pure.parts or ".." in pure.parts or "\0" in relative
    too_long = len(relative) > _LONGEST_PATH or any(len(os.fsencode(part)) > _LONGEST_NAME for part in pure.parts)
    if strange or too_long or pure.as_posix() != relative:
        why = (
            "too long for a file" if too_long else "outside of its directory" if strange else "not in its shortest form"
        )
        raise UnsafePathError(f"{root / MANIFEST} names {relative[:200]!r}, which is {why}")
    path = root
    for part in pure.parts:
        path = path / part
        if path.is_symlink():
            raise UnsafePathError(f"{path} is a symbolic link; a checkpoint holds plain files only")
    return path


class UnsafePathError(CheckpointError):
    """A path that leads, or could lead, outside of the checkpoint."""

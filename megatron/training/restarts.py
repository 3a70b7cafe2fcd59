"""Ends a run that its launcher restarts repeatedly without progress (torchrun's --max-restarts, Slurm's requeue).

A file in the save directory records the last start: its launch, the newest step then, and the number of starts in a row
that found this step.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.checkpoint import paths
from megatron.distributed.launch import LaunchInfo
from megatron.errors import NoProgressError
from megatron.training.exit import FILE as EXIT_REASON
from megatron.utils.durable import write_atomically
from megatron.utils.typed import typed

FILE = ".starts.json"
AT_MOST = 3


@dataclass(frozen=True)
class Starts:
    """Number of starts of one launch in a row without a new step."""

    run_id: str
    newest_step: int
    number: int


def count_start(directory: Path, launch: LaunchInfo, between: Sequence[int] = ()) -> None:
    """Records this start. Raises NoProgressError if the launcher has started the run too often without a new step; a
    manual start is never rejected. `between`: the non-persistent steps."""
    if launch.launcher not in ("torchrun", "slurm"):
        return  # nothing restarts it
    newest = max([*paths.list_steps(directory), *between], default=-1)
    before = _read(directory / FILE)
    number = 1
    if launch.attempt > 0 and before is not None and (before.run_id, before.newest_step) == (launch.run_id, newest):
        number += before.number
    if number > AT_MOST:
        raise NoProgressError(_message(directory, newest))
    text = json.dumps(asdict(Starts(launch.run_id, newest, number)))
    write_atomically(directory / FILE, [text.encode()], sync=False)


def _message(directory: Path, newest: int) -> str:
    found = _json(directory / EXIT_REASON)
    cause = f"{found.get('reason')}: {found.get('text')}" if found else "ended without an error message"
    if found.get("reason") == NoProgressError.__name__:
        return str(found.get("text"))  # the previous start was rejected as well
    after = f"after iteration {newest}" if newest >= 0 else "at all"
    return (
        f"--save {directory}: {AT_MOST} starts of this launch in a row have made no checkpoint {after}, so the run is "
        f"not started again. The last start: {cause}. Fix the cause, or save more often (--save-interval), then start "
        "the run manually"
    )


def _read(path: Path) -> Starts | None:
    try:
        return typed(Starts, _json(path))
    except ValueError:
        return None


def _json(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}

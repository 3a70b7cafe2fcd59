"""Deletes older steps of this run, and renames newer steps of other runs, when a step is saved."""

import shutil
from pathlib import Path

from megatron.checkpoint import paths
from megatron.checkpoint.run_state import Retention, RunHistory
from megatron.utils import durable


def sweep(directory: Path, run_id: str, *, exclusive: bool) -> list[str]:
    """Removes files that ended runs left partly written or partly deleted. With `exclusive`, this run has the lock, so
    no other run is writing."""
    messages = []
    for entry in sorted(directory.iterdir()):
        ours = exclusive or entry.name.endswith(f".{run_id}")
        unfinished_file = exclusive and durable.target_of(entry.name) is not None
        if unfinished_file or (entry.name.startswith(paths.TEMPORARY) and ours):
            _remove(entry)
            messages.append(f"removed the unfinished {entry.name}")
        elif entry.name.startswith(paths.TRASH) and exclusive:
            _remove(entry)
            messages.append(f"finished deleting {entry.name}")
    return messages


def warning_before_training(directory: Path, history: RunHistory) -> str | None:
    """Returns a warning about steps of another run that the first save will rename. Leaves out damaged steps, which the
    load has reported."""
    steps = [step for step in _newer_than_start(directory, history) if step not in history.bad_steps(directory)]
    if not steps:
        return None
    names, start = [paths.step_name(step) for step in reversed(steps)], history.started_from
    what = f"1 step ({names[0]})" if len(names) == 1 else f"{len(names)} steps ({names[0]} to {names[-1]})"
    onward = f"--load {directory} (without --finetune, --ckpt-step or --override-ckpt-iteration) to resume from them"
    return (
        f"--save {directory}: holds {what} newer than iteration {start}, where this run starts; "
        f"its first save renames them to {paths.ABANDONED}...; give {onward}, or another --save to leave them unchanged"
    )


def _newer_than_start(directory: Path, history: RunHistory, saving: int | None = None) -> list[int]:
    """Lists steps of other runs that are newer than this run's start or equal to `saving`, the newest first."""
    own = {history.loaded_step(directory), *history.committed_steps(directory)}
    steps = paths.list_steps(directory)
    return [step for step in steps if step not in own and (step > history.started_from or step == saving)]


def set_aside_newer(directory: Path, step: int, history: RunHistory) -> list[str]:
    """Renames steps of other runs that are newer than this run's start, or equal to `step`. Renamed steps are never
    read or deleted."""
    messages = []
    for other in _newer_than_start(directory, history, step):
        bad = other in history.bad_steps(directory)
        prefix = paths.BAD if bad else paths.ABANDONED
        target = free_name(directory, prefix + paths.step_name(other))
        durable.rename(paths.step_directory(directory, other), target)
        history.bad_steps(directory).discard(other)
        why = "found damaged" if bad else f"not part of this run, which started from iteration {history.started_from}"
        messages.append(f"{paths.step_name(other)} renamed to {target.name} ({why})")
    return messages


def retain(directory: Path, history: RunHistory, wanted: Retention, *, tracker_step: int) -> list[str]:
    """Deletes the steps that `wanted` does not keep, but never the tracker's, the loaded or the two newest steps."""
    last, interval = wanted.last, wanted.interval
    if last is None and interval is None:
        return []
    steps = paths.list_steps(directory)
    kept = {*steps[: max(2, last or 0)], tracker_step, history.loaded_step(directory)}
    if interval is not None:
        kept |= {step for step in steps if step % interval == 0}
    messages = []
    for step in sorted(set(steps) - kept):
        delete(directory, step)
        messages.append(f"deleted {paths.step_name(step)}")
    return messages


def keep_only(directory: Path, step: int | None) -> None:
    """Deletes all non-persistent steps but this one, because only the newest is useful."""
    for other in paths.list_steps(directory):
        if other != step:
            delete(directory, other)


def delete(directory: Path, step: int) -> None:
    """Deletes a step. It is renamed first, so that a crash never leaves half of it under its name."""
    trash = free_name(directory, paths.TRASH + paths.step_name(step))
    durable.rename(paths.step_directory(directory, step), trash)
    shutil.rmtree(trash)


def free_name(directory: Path, name: str) -> Path:
    target, number = directory / name, 1
    while target.exists():
        target, number = directory / f"{name}.{number}", number + 1
    return target


def _remove(entry: Path) -> None:
    if paths.is_plain_directory(entry):
        shutil.rmtree(entry)
    else:
        entry.unlink()

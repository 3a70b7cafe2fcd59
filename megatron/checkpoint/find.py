"""Chooses the step that `--load` takes.

A valid tracker file decides, so writing another step into it rewinds the run. `--ckpt-step` overrides the tracker. If
the tracker is missing, unreadable or names no committed step, the newest valid step is taken, with a warning.
"""

from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import paths
from megatron.errors import CheckpointError, ConfigError
from megatron.utils.foreign import is_not_a_directory, model_meant, refuse_hugging_face


@dataclass(frozen=True)
class Candidates:
    """Step directories in the order in which they are tried; an empty list means a fresh start."""

    directories: tuple[Path, ...]
    release: bool = False
    warning: str | None = None
    if_damaged: str = "no valid checkpoint is left to fall back to"  # error text if none of the directories is valid

    @property
    def first_step(self) -> int | None:
        """The first step that is tried; None for a start at iteration 0."""
        return None if self.release or not self.directories else paths.step_of(self.directories[0].name)


def find_candidates(
    directory: Path, *, save_dir: Path | None = None, step: int | None = None, strict: bool = False
) -> Candidates:
    """Applies the rules of --load. With `strict` or an explicit step there is only one candidate."""
    same_as_save = save_dir is not None and directory.resolve() == save_dir.resolve()
    refuse_hugging_face(directory)
    refuse_shares(directory, f"--load {directory}")
    is_file = directory.exists() and not directory.is_dir()
    if step is None and same_as_save and not is_file and paths.holds_nothing(directory):
        return Candidates(())
    if not directory.is_dir():
        if is_file and directory.suffix == ".gguf":
            raise ConfigError(f"--load {directory}: {is_not_a_directory(directory)}")
        what = "is not a directory" if is_file else "does not exist"
        meant = "" if is_file else model_meant(directory)
        fresh = "" if save_dir is None else ", or the same as --save for a fresh start"
        raise ConfigError(f"--load {directory}: {what}; give a directory with checkpoints{fresh}{meant}")
    if step is not None:
        others = [other for other in paths.list_steps(directory) if other != step]
        return Candidates((_explicit(directory, step),), if_damaged=_not_taken(f"--ckpt-step {step}", others))
    tracker = paths.read_tracker(directory)
    if tracker.release:
        return Candidates((_release(directory),), release=True)
    steps = paths.list_steps(directory)
    if tracker.step is not None and tracker.step in steps:
        older = [s for s in steps if s < tracker.step]
        if strict:
            newest = paths.step_directory(directory, tracker.step)
            return Candidates((newest,), if_damaged=_not_taken(f"step {tracker.step} of {paths.TRACKER}", older))
        return Candidates(tuple(paths.step_directory(directory, s) for s in (tracker.step, *older)))
    problem = tracker.problem or f"{directory / paths.TRACKER} names step {tracker.step}, which does not exist"
    if not steps:
        raise CheckpointError(
            f"--load {directory}: no valid checkpoint ({problem}{_set_aside(directory)}); {_way_out(directory)}"
        )
    if strict:
        raise CheckpointError(f"--load {directory}: {problem}; name a step with --ckpt-step ({_some(steps)})")
    warning = f"{problem}: taking the newest valid checkpoint instead"
    return Candidates(tuple(paths.step_directory(directory, s) for s in steps), warning=warning)


def refuse_shares(directory: Path, given: str) -> None:
    """Rejects a directory with shares of a local step (`local/`), because a load needs the shares of all ranks.
    Recognises the folder of one share, of one rank, of one run, and the run's --non-persistent-local-ckpt-dir."""
    steps = "rank_*/iter_*/"
    depths = ("", "iter_*/") if paths.list_steps(directory) else ("", "iter_*/", steps, f"*/{steps}")
    if any(True for depth in depths for _ in directory.glob(depth + paths.SHARE)):
        raise CheckpointError(
            f"{given}: holds shares of a local non-persistent checkpoint, which needs the shares of all ranks. Restart "
            "the run that saved them, with the same --save, --load and --non-persistent-local-ckpt-dir; then give its "
            "next persistent checkpoint here"
        )


def _explicit(directory: Path, step: int) -> Path:
    chosen = paths.step_directory(directory, step)
    if not paths.is_plain_directory(chosen):
        there = paths.list_steps(directory)
        raise CheckpointError(f"--ckpt-step {step}: {directory} has no such step; it has {_some(there)}")
    return chosen


def _not_taken(asked: str, others: list[int]) -> str:
    there = f"to use another step, give --ckpt-step ({_some(others)})" if others else "there is no other step"
    return f"only {asked} was tried; {there}"


def _release(directory: Path) -> Path:
    chosen = directory / paths.RELEASE
    if not paths.is_plain_directory(chosen):
        raise CheckpointError(
            f"--load {directory}: {paths.TRACKER} names {paths.RELEASE!r}, but {chosen} does not exist; "
            "name a step with --ckpt-step"
        )
    return chosen


def _some(steps: list[int]) -> str:
    if not steps:
        return "none"
    shown = ", ".join(str(step) for step in steps[:8])
    return shown + (", ..." if len(steps) > 8 else "")


def _way_out(directory: Path) -> str:
    step = paths.step_of(directory.name)
    if step is not None:
        return f"it is one step of a run; give --load {directory.parent} --ckpt-step {step}"
    if (directory / "config.json").is_file() or any(True for _ in directory.glob("*.gguf")):
        return (
            "if this is a Hugging Face model, its folder has no weights in safetensors or .bin files: download it "
            "again with such files (GGUF and other formats are not supported)"
        )
    return "give the directory that a run's --save names"


def _set_aside(directory: Path) -> str:
    names = sorted(entry.name for entry in directory.iterdir() if entry.name.startswith(paths.SET_ASIDE))
    return f"; renamed by earlier runs: {', '.join(names[:4])}" if names else ""

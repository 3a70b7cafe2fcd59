"""The step that `--load` takes: found, verified, and described by its manifest before any tensor is read."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.checkpoint import paths
from megatron.checkpoint.all_ranks import run_on_all, run_on_first, share
from megatron.checkpoint.find import Candidates, find_candidates
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.reader import StepReader
from megatron.checkpoint.run_state import RunHistory
from megatron.checkpoint.step_source import OWN_STEPS, ForeignStep, StepSource
from megatron.checkpoint.verify import DamagedCheckpointError, identity, unlisted, verified_manifest, verify_share
from megatron.distributed.parallel_state import Axis, ParallelState
from megatron.errors import CheckpointError
from megatron.layout import Layout
from megatron.model.parameters import WORD_TABLE
from megatron.tokenizer import Tokenizer, TokenizerSettings, build_tokenizer
from megatron.tokenizer.for_transformers import TokenizerFiles

Log = Callable[[str], object]
AtHand = Callable[[Collection[str]], AbstractContextManager[Path]]
"""Function that returns a directory with the files that this rank needs. All ranks call it."""
Newer = Callable[[int | None, Log], "FoundStep | None"]
"""Function that finds a newer step of the same run than the given one (None: iteration 0). All ranks call it."""


@dataclass(frozen=True)
class FoundStep:
    """A verified step; only its manifest has been read."""

    directory: Path
    manifest: Manifest
    release: bool
    foreign: ForeignStep | None = None
    """The opened step, if Megatron-LM wrote it. `manifest` is then made from its files."""
    save: Path | None = None
    """Save directory of the run, for a non-persistent step; None for a step in that directory."""
    at_hand: AtHand | None = None
    """Function that collects the files of a local step, which are on several machines."""
    unhashed: bool = False
    """True if only sizes were compared. The load then hashes what it reads and may raise a DamagedCheckpointError."""

    def reader(self, directory: Path | None = None) -> StepReader:
        """Returns a reader of the step. `directory` has the files if they were collected outside of the step."""
        return StepReader(directory or self.directory, self.manifest) if self.foreign is None else self.foreign.reader

    def in_save_directory(self) -> dict[Path, int]:
        """Maps the save directory to its step that training continues from; empty if there is none."""
        line = self.manifest.line
        step = self.manifest.step if line is None else line.base
        return {} if step is None else {self.saved_by.resolve(): step}

    @property
    def saved_by(self) -> Path:
        """Save directory of the run that saved this step."""
        return self.directory.parent if self.save is None else self.save

    def with_vocabulary(self, rows: int) -> "FoundStep":
        """Cuts the vocabulary tables of a step of Megatron-LM, which are saved with padding, to `rows` rows. Returns a
        native step unchanged."""
        if self.foreign is None:
            return self
        foreign = self.foreign.with_vocabulary(rows)
        return replace(self, manifest=foreign.manifest, foreign=foreign)

    @property
    def tokenizer(self) -> Path | None:
        folder = self.directory / paths.TOKENIZER
        return folder if folder.is_dir() else None

    @property
    def tokenizer_files(self) -> TokenizerFiles | None:
        """The files of the tokenizer that the manifest lists."""
        folder, beginning = self.tokenizer, f"{paths.TOKENIZER}/"
        listed = {name.removeprefix(beginning) for name in self.manifest.files if name.startswith(beginning)}
        names = frozenset(name for name in listed if "/" not in name)
        return None if folder is None or not names else TokenizerFiles(folder, names)

    def saved_settings(self) -> dict[str, dict[str, Any]]:
        """Returns the saved configuration. A vocabulary size that was not set is the number of rows of the saved token
        embedding, because the tokenizer may have fewer tokens."""
        settings = {section: dict(values) for section, values in self.manifest.config.items()}
        words, tokenizer = self.manifest.model.get(WORD_TABLE), settings.setdefault("tokenizer", {})
        if words is not None and tokenizer.get("vocab_size") is None:
            tokenizer["vocab_size"] = words.logical_shape[0]
        return settings


def find_checkpoint(
    directory: Path,
    *,
    parallel: ParallelState,
    step: int | None = None,
    save_dir: Path | None = None,
    strict: bool = False,
    check_hashes: bool = True,
    hash_later: bool = False,
    history: RunHistory | None = None,
    log: Log = print,
    newer: Newer | None = None,
    source: StepSource = OWN_STEPS,
) -> FoundStep | None:
    """Finds the step that --load takes and verifies it on every rank. Returns None for a fresh start, which is logged.

    If `newer` finds a step that continues from this one, that step is taken. With `hash_later` the load verifies the
    checksums, so that the files are read only once. If the load raises, the caller falls back to an older step.
    `source` opens steps of other programs. All ranks call this function; `log` is called on the first one only.
    """
    say = log if parallel.world.rank == 0 else say_nothing
    candidates = run_on_first(
        lambda: find_candidates(directory, save_dir=save_dir, step=step, strict=strict), parallel.world, Candidates
    )
    if newer is not None and (found := newer(candidates.first_step, say)) is not None:
        return found
    if not candidates.directories:
        say(f"--load {directory} is also --save and holds no checkpoint: a fresh start")
        return None
    if candidates.warning:
        say(f"warning: {candidates.warning}")
    for candidate in candidates.directories:
        try:
            opened = partial(
                source.open_step, candidate, lambda text: say(f"warning: {text}"), check_hashes=check_hashes
            )
            foreign = run_on_all(opened, parallel.world)
            if foreign is not None:
                say(f"{candidate} was written by Megatron-LM: {_checked(check_hashes)}")
                return FoundStep(candidate, foreign.manifest, candidates.release, foreign)
            record = run_on_all(partial(verified_manifest, candidate), parallel.world)
            if check_hashes and not hash_later:
                verify_together(candidate, record, parallel.world)
        except DamagedCheckpointError as error:
            if candidate == candidates.directories[-1]:
                raise CheckpointError(f"{error}; {candidates.if_damaged}") from error
            say(f"warning: {error}")
            say(f"warning: {candidate} is damaged: FALLING BACK to an older step; the next save renames it to "
                f"{paths.BAD}{candidate.name}")  # fmt: skip
            number = paths.step_of(candidate.name)
            if history is not None and number is not None:
                history.bad_steps(directory).add(number)
            continue
        warn_of_unlisted(candidate, record, say)
        if not check_hashes:
            say(f"warning: --skip-hash: the checksums of {candidate} were not verified")
        return FoundStep(candidate, record, candidates.release, unhashed=check_hashes and hash_later)
    raise AssertionError("find_candidates gave no candidate and no fresh start")


def warn_of_unlisted(directory: Path, record: Manifest, say: Log) -> None:
    if say is not say_nothing and (text := unlisted(directory, record)):
        say(f"warning: {text}")


def _checked(check_hashes: bool) -> str:
    how = "are verified when it is read" if check_hashes else "are not verified (--skip-hash)"
    return f"its CRC-32 checksums {how}"


def verify_together(directory: Path, record: Manifest, world: Axis) -> None:
    """Verifies checksums. Ranks that see the same files split the hashing and share the result; a copy that only one
    machine sees is hashed by the ranks of that machine."""
    number, count = share(partial(identity, directory, record), world)
    run_on_all(partial(verify_share, directory, record, number, count), world)


def say_nothing(text: str) -> None:
    """Discards a log line; for ranks other than the first."""


describe_step = partial(find_checkpoint, parallel=ParallelState.plan(Layout(1), 0), check_hashes=False, log=say_nothing)
"""Finds the step that --load takes, in one process. Logs nothing and leaves the checksums to the load."""


def saved_tokenizer(found: FoundStep) -> Tokenizer | None:
    """Returns the tokenizer that the run saved; None if its data came as token ids."""
    files = found.tokenizer_files
    if files is not None and files.has_json:
        return files.tokenizer()
    saved = found.manifest.config.get("tokenizer")
    if not isinstance(saved, dict) or type(saved.get("vocab_size")) is not int:
        return None
    if saved.get("tokenizer_type") == "NullTokenizer" and saved["vocab_size"]:
        settings = TokenizerSettings(
            tokenizer_type="NullTokenizer",
            vocab_size=saved["vocab_size"],
            null_tokenizer_eod_id=saved.get("null_tokenizer_eod_id"),
        )
        return build_tokenizer(settings, announce=False)
    return None

"""Loading: chooses a step, verifies it, refuses what does not fit, and copies the slices that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import determinism, paths
from megatron.checkpoint.all_ranks import run_on_all, run_on_first
from megatron.checkpoint.architecture import check_architecture
from megatron.checkpoint.find import Candidates, find_candidates
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.megatron_lm import ForeignStep, open_foreign
from megatron.checkpoint.placed import Own, PlacedReader, Placing
from megatron.checkpoint.reader import PlannedReader, StepReader
from megatron.checkpoint.state import (
    Held,
    LoadedState,
    RunHistory,
    Sharded,
    Take,
    axis_sizes,
    in_memory,
    rank_file,
    share_file,
    writes,
)
from megatron.checkpoint.storage import Plan
from megatron.checkpoint.verify import DamagedCheckpointError, identity, verified_manifest, verify_share
from megatron.config import ModelConfig, MoEConfig
from megatron.distributed.messages import all_gather_json
from megatron.distributed.state import Axis, ParallelState
from megatron.errors import CheckpointError
from megatron.model.parameters import WORD_TABLE

Log = Callable[[str], object]
AtHand = Callable[[Collection[str]], AbstractContextManager[Path]]
"""The files that this rank needs -> the directory with them. All ranks call it."""
Newer = Callable[[int | None, Log], "FoundStep | None"]
"""A step, or None for a start at iteration 0 -> a newer step of the same run. All ranks call it."""


@dataclass(frozen=True)
class FoundStep:
    """A verified step of which only the manifest has been read."""

    directory: Path
    manifest: Manifest
    release: bool
    foreign: ForeignStep | None = None
    """If Megatron-LM wrote it: then the manifest is made from its files."""
    save: Path | None = None
    """For a non-persistent step: the save directory of its run."""
    at_hand: AtHand | None = None
    """For a local step, whose files are on several machines."""
    unhashed: bool = False
    """Its sizes alone have been compared: the load hashes what it reads, and raises a DamagedCheckpointError."""

    def reader(self, directory: Path | None = None) -> StepReader:
        """`directory`: with the files, if they have been brought together there."""
        return StepReader(directory or self.directory, self.manifest) if self.foreign is None else self.foreign.reader

    def in_save_directory(self) -> dict[Path, int]:
        """The step of the save directory that a run resumes from."""
        line = self.manifest.line
        step = self.manifest.step if line is None else line.base
        return {} if step is None else {self.saved_by.resolve(): step}

    @property
    def saved_by(self) -> Path:
        """The save directory of the run that saved it."""
        return self.directory.parent if self.save is None else self.save

    def with_vocabulary(self, rows: int) -> FoundStep:
        """The step with its vocabulary tables cut to `rows` rows: Megatron-LM saves them with their padding."""
        if self.foreign is None:
            return self
        foreign = self.foreign.with_vocabulary(rows)
        return replace(self, manifest=foreign.manifest, foreign=foreign)

    @property
    def tokenizer(self) -> Path | None:
        folder = self.directory / paths.TOKENIZER
        return folder if folder.is_dir() else None

    def saved_settings(self) -> dict[str, dict[str, Any]]:
        """The saved configuration, with the vocabulary size of the saved table: a tokenizer may have fewer entries."""
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
) -> FoundStep | None:
    """The step that --load takes, verified on every rank; None is a fresh start, which is logged. A `newer` one is
    taken instead if it goes on from that step. `hash_later`: the load verifies the checksums, which reads the files
    once; then what it raises takes the place of an older step.

    All ranks call it; `log` is called on the first one only.
    """
    say = log if parallel.world.rank == 0 else _say_nothing
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
            foreign = run_on_all(partial(open_foreign, candidate), parallel.world)
            if foreign is not None:
                say(f"warning: {candidate} was written by Megatron-LM without checksums: what was damaged is not seen")
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
        if not check_hashes:
            say(f"warning: --skip-hash: the checksums of {candidate} were not verified")
        return FoundStep(candidate, record, candidates.release, unhashed=check_hashes and hash_later)
    raise AssertionError("find_candidates gave no candidate and no fresh start")


def verify_together(directory: Path, record: Manifest, world: Axis, plans: Mapping[str, Plan] | None = None) -> None:
    """Ranks that see the same files hash a share of them each, and the verdict of one is that of all. A copy that only
    the ranks of one machine see is hashed by them. `plans`: see `verify_share`."""
    copies = all_gather_json(run_on_all(partial(identity, directory, record), world), world, str)
    sharing = [rank for rank, copy in enumerate(copies) if copy == copies[world.rank]]
    run_on_all(partial(verify_share, directory, record, sharing.index(world.rank), len(sharing), plans), world)


def _say_nothing(text: str) -> None:
    """Only the first rank logs."""


def load_checkpoint(
    found: FoundStep,
    *,
    parallel: ParallelState,
    params: Mapping[str, Sharded],
    take: Take | None = None,
    held: Held | None = None,
    own: Own | None = None,
    finetune: bool = False,
    load_optim: bool = True,
    load_rng: bool = True,
    model_config: ModelConfig | None = None,
    moe_config: MoEConfig | None = None,
    history: RunHistory | None = None,
    fingerprint: determinism.Fingerprint | None = None,
    deterministic: bool = False,
    log: Log = print,
) -> LoadedState:
    """Fills `params` in place and returns the rest of the run's state. All ranks call it. `take`: see `in_memory`;
    `held`: the elements of a parameter whose optimizer state this rank keeps, if not all; `own`: the tensors that it
    keeps them in, some of which the result may have, filled.

    `finetune` takes the weights alone and starts at iteration 0. `fingerprint` is this run's (`determinism.py`);
    a `deterministic` run goes on with the kernels that it began with, or not at all.
    """
    say = log if parallel.world.rank == 0 else _say_nothing
    if WORD_TABLE in params:
        found = found.with_vocabulary(params[WORD_TABLE][0].logical_shape[0])
    load = _Load(found, params, take, held, parallel, finetune or found.release, load_optim, load_rng, say)
    run_on_all(lambda: load.check_fit(model_config, moe_config), parallel.world)
    run_on_all(lambda: load.report_changes(fingerprint or {}, deterministic), parallel.world)
    files: AbstractContextManager[Path] = nullcontext(found.directory)
    if found.at_hand is not None:
        files = found.at_hand(run_on_all(load.files_needed, parallel.world))
    if found.unhashed:
        reader = load.verified(own if own is not None and load_optim else {})
        return load.finished(run_on_all(lambda: load.read(reader), parallel.world), history)
    with files as directory:
        state = run_on_all(lambda: load.read(load.found.reader(directory)), parallel.world)
    return load.finished(state, history)


@dataclass(frozen=True)
class _Load:
    """One load on one rank."""

    found: FoundStep
    params: Mapping[str, Sharded]
    take: Take | None
    held: Held | None
    parallel: ParallelState
    weights_only: bool
    load_optim: bool
    load_rng: bool
    say: Log

    def check_fit(self, model_config: ModelConfig | None, moe_config: MoEConfig | None) -> None:
        """Refuses a checkpoint that does not fit before any tensor is read."""
        saved = self.found.manifest
        if model_config is not None and "model" in saved.config:
            for change in check_architecture(saved.config, model_config, moe_config, finetune=self.weights_only):
                self.say(f"warning: {change}")
        self._check_names(saved)
        if self.weights_only:
            return
        foreign = self.found.foreign
        if self.load_optim and foreign is not None and foreign.optimizer_problem is not None:
            raise CheckpointError(foreign.optimizer_problem)
        self._check_holds("optimizer", self.load_optim, "--no-load-optim")
        if foreign is None:
            self._check_holds("rng", self.load_rng, "--no-load-rng")
        elif self.load_rng:
            self.say(
                f"warning: the random states of {self.found.directory} are Megatron-LM's and do not apply; with "
                "dropout the next steps differ from those of the run there"
            )
        if self.load_optim:
            without = [n for n, (_, t) in self.params.items() if t.requires_grad and n not in saved.optimizer]
            if without:
                raise CheckpointError(
                    f"{self.found.directory} has no optimizer state of {_listed(without)}; "
                    "resume with the same optimizer and precision, or give --no-load-optim"
                )

    def report_changes(self, ours: determinism.Fingerprint, deterministic: bool) -> None:
        """Warns if this run computes under other conditions than the run that saved the step; refuses other kernels if
        it is to be `deterministic`."""
        changed = [] if self.weights_only else determinism.changes(self.found.manifest.fingerprint, ours)
        kernels = [change for change in changed if change.startswith("kernels.")]
        if kernels and deterministic:
            raise CheckpointError(
                f"--deterministic-mode: {self.found.directory} was saved with other kernels ({', '.join(kernels)}); "
                "resume with the same (--kernels), or without --deterministic-mode"
            )
        if changed:
            self.say(
                f"warning: {self.found.directory} was saved under other conditions ({', '.join(changed)}): the next "
                "steps are not bit-equal to those of the uninterrupted run"
            )

    def _check_names(self, saved: Manifest) -> None:
        # A pipeline stage or expert-parallel rank holds some of the names: extra ones are an error only on a whole
        # model.
        whole = self.parallel.pp.size == 1 and self.parallel.ep.size == 1
        missing = [name for name in self.params if name not in saved.model]
        extra = [name for name in saved.model if name not in self.params] if whole else []
        shapes = [
            f"{name}: model {tuple(spec.logical_shape)}, checkpoint {saved.model[name].logical_shape}"
            for name, (spec, _) in self.params.items()
            if name in saved.model and tuple(spec.logical_shape) != saved.model[name].logical_shape
        ]
        wrong = [
            *([f"missing: {_listed(missing)}"] if missing else []),
            *([f"not in this model: {_listed(extra)}"] if extra else []),
            *([f"other shapes: {_listed(shapes)}"] if shapes else []),
        ]
        if wrong:
            raise CheckpointError(
                f"{self.found.directory} does not fit the model ({'; '.join(wrong)}){self._way_to_vocabulary(saved)}"
            )

    def _way_to_vocabulary(self, saved: Manifest) -> str:
        ours, theirs = self.params.get(WORD_TABLE), saved.model.get(WORD_TABLE)
        if ours is None or theirs is None or ours[0].logical_shape[0] == theirs.logical_shape[0]:
            return ""
        rows = theirs.logical_shape[0]
        return f"; the checkpoint's vocabulary is --vocab-size {rows}, and --use-checkpoint-args takes it"

    def _check_holds(self, part: str, wanted: bool, flag: str) -> None:
        if wanted and part not in self.found.manifest.holds:
            raise CheckpointError(
                f"{self.found.directory} was saved without its {part} state; give {flag} to go on without, "
                "or --finetune to take the weights alone"
            )

    def files_needed(self) -> set[str]:
        """The files that `read` would open, found by a dry run of it."""
        reader, quiet = PlannedReader(self.found.directory, self.found.manifest), replace(self, say=_say_nothing)
        with torch.device("meta"):
            replace(quiet, take=lambda name, tensor: None).read(reader)
        return reader.names

    def verified(self, own: Own) -> StepReader:
        """Hashes the step, and reads into the model, and into `own`, what they store as the files do."""
        directory, saved = self.found.directory, self.found.manifest

        def planned() -> tuple[PlacedReader, dict[str, Plan]]:
            with closing(Placing(directory, saved)) as placing:
                reader = placing.reader(self.params, {} if self.weights_only else own, self.held)
                return reader, placing.plans

        reader, plans = run_on_all(planned, self.parallel.world)
        verify_together(directory, saved, self.parallel.world, plans)
        return reader

    def finished(self, state: LoadedState, history: RunHistory | None) -> LoadedState:
        if history is not None:
            history.started_from = state.iteration
            if not self.weights_only:
                history.loaded |= self.found.in_save_directory()
        return state

    @torch.no_grad()
    def read(self, reader: StepReader) -> LoadedState:
        saved = self.found.manifest
        for name, (spec, tensor) in self.params.items():
            if tensor.is_meta and self.take is not None:
                mapped = reader.mapped(spec, tensor, saved.model[name], cast=self.weights_only)
                if mapped is not None:
                    self.take(name, mapped)  # which reads its piece of it alone
                    continue
            with in_memory(name, tensor, self.take) as target:
                reader.fill(spec, target, saved.model[name], cast=self.weights_only)
        extra = dict(reader.main_value("extra") or {})
        if self.weights_only:
            return LoadedState(path=self.found.directory, step=saved.step, extra=extra)
        return LoadedState(
            path=self.found.directory,
            step=saved.step,
            iteration=saved.step,
            consumed_train_samples=saved.consumed_train_samples,
            consumed_valid_samples=saved.consumed_valid_samples,
            optimizer=self._read_optimizer(reader) if self.load_optim else None,
            optimizer_extra=dict(reader.main_value("optimizer", "extra")) if self.load_optim else None,
            scheduler=dict(reader.main_value("opt_param_scheduler")),
            rng=self._read_rng(reader) if self.load_rng and self.found.foreign is None else None,
            extra=extra,
        )

    def _read_optimizer(self, reader: StepReader) -> dict[str, dict[str, Any]]:
        found = {}
        for name, (spec, tensor) in self.params.items():
            if name in reader.manifest.optimizer:
                held = None if self.held is None else self.held(name)
                found[name] = reader.optimizer_like(name, spec, tensor.shape, held)
        return found

    def _read_rng(self, reader: StepReader) -> dict[str, Any] | None:
        """This rank's random state, or None if the layout has changed: ranks then keep their freshly seeded streams."""
        saved, ours = reader.manifest.layout, axis_sizes(self.parallel)
        changed = [f"{name} {saved.get(name)} -> {size}" for name, size in ours.items() if saved.get(name) != size]
        if changed:
            self.say(
                f"warning: the layout changed ({', '.join(changed)}): its random states do not apply; "
                "with dropout the next steps differ from the uninterrupted run"
            )
            return None
        own = share_file(self.parallel)
        if own not in reader.manifest.files:  # one file held those of all replicas
            return dict(reader.value(rank_file(self.parallel), "rng_state")[self.parallel.dp_cp.rank])
        return dict(reader.value(rank_file(self.parallel) if writes(self.parallel) else own, "rng_state")[0])


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

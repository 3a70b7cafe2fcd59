"""Loads a checkpoint: checks that it fits the run, and copies the slices that this rank holds."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import determinism
from megatron.checkpoint.all_ranks import run_on_all
from megatron.checkpoint.architecture import check_architecture
from megatron.checkpoint.besides_tensors import saved_values
from megatron.checkpoint.found_step import FoundStep, Log, say_nothing
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.reader import Own, StepReader, read_and_verify
from megatron.checkpoint.run_state import (
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
from megatron.config import ModelConfig, MoEConfig
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import CheckpointError
from megatron.model.parameters import WORD_TABLE


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
    """Fills `params` in place and returns the rest of the run's state. All ranks call it.

    The function `take` is described in `in_memory`. The function `held` gives the elements of a parameter's optimizer
    state that this rank keeps (default: all). `own` has this rank's optimizer tensors; the result has those that were
    filled in place. With `finetune` only the weights are taken, at iteration 0. The `fingerprint` is this run's
    (`determinism.py`). With `deterministic`, the load raises if the kernels differ from those of the saving run.
    """
    say = log if parallel.world.rank == 0 else say_nothing
    if WORD_TABLE in params:
        found = found.with_vocabulary(params[WORD_TABLE][0].logical_shape[0])
    load = _Load(found, params, take, held, parallel, finetune or found.release, load_optim, load_rng, say)
    run_on_all(lambda: load.check_fit(model_config, moe_config), parallel.world)
    run_on_all(lambda: load.report_changes(fingerprint or {}, deterministic), parallel.world)
    files: AbstractContextManager[Path] = nullcontext(found.directory)
    if found.at_hand is not None:
        files = found.at_hand(run_on_all(load.files_needed, parallel.world))
    if found.unhashed:
        into = own if own is not None and load_optim and not load.weights_only else {}
        reader = read_and_verify(found.directory, found.manifest, params, into, held, parallel.world)
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
        """Raises if the checkpoint does not fit, before any tensor is read."""
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
                "dropout the next steps differ from the original run"
            )
        if self.load_optim:
            without = [n for n, (_, t) in self.params.items() if t.requires_grad and n not in saved.optimizer]
            if without:
                raise CheckpointError(
                    f"{self.found.directory} has no optimizer state of {_listed(without)}; "
                    "resume with the same optimizer and precision, or give --no-load-optim"
                )

    def report_changes(self, ours: determinism.Fingerprint, deterministic: bool) -> None:
        """Warns if this run computes under other conditions than the run that saved the step. Raises if the
        kernels differ and `deterministic` is set."""
        changed = [] if self.weights_only else determinism.changes(self.found.manifest.fingerprint, ours)
        kernels = [change for change in changed if change.startswith("kernels.")]
        if kernels and deterministic:
            raise CheckpointError(
                f"--deterministic-mode: {self.found.directory} was saved with other kernels ({', '.join(kernels)}); "
                "give the same --kernels, or remove --deterministic-mode"
            )
        if changed:
            self.say(
                f"warning: {self.found.directory} was saved under other conditions ({', '.join(changed)}): the next "
                "steps are not bit-equal to those of the uninterrupted run"
            )

    def _check_names(self, saved: Manifest) -> None:
        # A pipeline stage or expert-parallel rank holds only some of the saved names. Other saved names are an error
        # only if this rank holds the whole model.
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
        return f"; give --vocab-size {rows}, as in the checkpoint, or --use-checkpoint-args"

    def _check_holds(self, part: str, wanted: bool, flag: str) -> None:
        if wanted and part not in self.found.manifest.holds:
            raise CheckpointError(
                f"{self.found.directory} was saved without its {part} state; give {flag} to resume without it, "
                "or --finetune to load only the weights"
            )

    def files_needed(self) -> set[str]:
        """The files that `read` opens."""
        reader, optimizer = self.found.reader(), self.found.manifest.optimizer
        needed = reader.files_of_values(reader.main_name(), self._place_of_rng()[0])
        for name, (spec, tensor) in self.params.items():
            needed |= reader.files_of(spec, tensor.shape, self.found.manifest.model[name])
            held = None if self.held is None or name not in optimizer else self.held(name)
            for record in optimizer.get(name, {}).values() if self.load_optim and not self.weights_only else ():
                needed |= reader.files_of(spec, tensor.shape, record, held)
        return needed & self.found.manifest.files.keys()

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
                    self.take(name, mapped)  # only the piece that the rank keeps is read
                    continue
            with in_memory(name, tensor, self.take) as target:
                reader.fill(spec, target, saved.model[name], cast=self.weights_only)
        step = self.found.directory
        with saved_values("extra values", step, "use another checkpoint"):
            extra = dict(reader.main_value("extra") or {})
        if self.weights_only:
            return LoadedState(path=step, step=saved.step, extra=extra)
        with saved_values("learning-rate schedule", step, "give --finetune to load only the weights"):
            scheduler = dict(reader.main_value("opt_param_scheduler"))
        return LoadedState(
            path=step,
            step=saved.step,
            iteration=saved.step,
            consumed_train_samples=saved.consumed_train_samples,
            consumed_valid_samples=saved.consumed_valid_samples,
            optimizer=self._read_optimizer(reader) if self.load_optim else None,
            optimizer_extra=self._read_counters(reader) if self.load_optim else None,
            scheduler=scheduler,
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

    def _read_counters(self, reader: StepReader) -> dict[str, Any]:
        with saved_values("optimizer's counters", self.found.directory, "give --no-load-optim to reset them"):
            return dict(reader.main_value("optimizer", "extra"))

    def _read_rng(self, reader: StepReader) -> dict[str, Any] | None:
        """This rank's random state, or None if the layout has changed: ranks then keep their freshly seeded streams."""
        saved, ours = reader.manifest.layout, axis_sizes(self.parallel)
        changed = [f"{name} {saved.get(name)} -> {size}" for name, size in ours.items() if saved.get(name) != size]
        if changed:
            self.say(
                f"warning: the layout changed ({', '.join(changed)}): the saved random states do not apply; "
                "with dropout the next steps differ from the uninterrupted run"
            )
            return None
        file, place = self._place_of_rng()
        with saved_values("random states", self.found.directory, "give --no-load-rng to start with new ones"):
            return dict(reader.value(file, "rng_state")[place])

    def _place_of_rng(self) -> tuple[str, int]:
        """The file with this rank's random state, and its index in the list there."""
        own, main = share_file(self.parallel), rank_file(self.parallel)
        if own not in self.found.manifest.files:  # one file holds the states of all replicas
            return main, self.parallel.dp_cp.rank
        return (main if writes(self.parallel) else own), 0


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

"""Converts a step of any format to a native checkpoint, with its optimizer state if it has one."""

from functools import partial
from pathlib import Path

import torch

from megatron.checkpoint import slices
from megatron.checkpoint.found_step import FoundStep
from megatron.checkpoint.manifest import TensorRecord
from megatron.checkpoint.run_state import SavedInfo, Sharded, TrainState
from megatron.errors import ConfigError
from megatron.interop.conversion import Reading, Show, save_native
from megatron.model.parameters import WORD_TABLE


def with_true_vocabulary(found: FoundStep, rows: int | None) -> FoundStep:
    """Cuts the vocabulary to `rows`, from --true-vocab-size; None keeps the checkpoint's own size."""
    if rows is None:
        return found
    cut = found.with_vocabulary(rows)
    if rows < 1 or cut.manifest.model[WORD_TABLE].logical_shape[0] != rows:
        held = found.manifest.model[WORD_TABLE].logical_shape[0]
        raise ConfigError(
            f"--true-vocab-size {rows}: the token embedding of {found.directory} has {held} rows; give 1 to {held}"
        )
    return cut


def import_step(found: FoundStep, save: Path, known_as: Path, show: Show) -> SavedInfo:
    """Saves the step natively, with one tensor at a time in memory."""
    reader, manifest, reading = found.reader(), found.manifest, Reading(show)

    def deferred(name: str, record: TensorRecord, what: str) -> Sharded:
        shape = slices.whole_stored_shape(manifest.model[name])
        dtype = getattr(torch, record.dtype.removeprefix("torch."))
        tensor = reading.tensor(what, shape, dtype, partial(reader.logical, name, record))
        return slices.whole_spec(name, manifest.model[name]), tensor

    params = {name: deferred(name, record, name) for name, record in manifest.model.items()}
    optimizer: dict[str, dict[str, Sharded]] | None = None
    if manifest.optimizer:
        optimizer = {
            name: {kind: deferred(name, record, f"{name} ({kind})") for kind, record in kinds.items()}
            for name, kinds in manifest.optimizer.items()
        }
    elif found.foreign is not None and found.foreign.optimizer_problem is not None:
        print(f"warning: {found.foreign.optimizer_problem.partition('; give')[0]}; only its weights are converted")
    main = reader.main_file()
    release = found.release or optimizer is None
    state = TrainState(
        params=params,
        config=found.saved_settings(),
        iteration=0 if release else manifest.step,
        consumed_train_samples=0 if release else manifest.consumed_train_samples,
        consumed_valid_samples=0 if release else manifest.consumed_valid_samples,
        optimizer=None if release else optimizer,
        optimizer_extra=main["optimizer"]["extra"],
        scheduler=main["opt_param_scheduler"],
    )
    return save_native(save, state, run_id="from-megatron-lm", known_as=known_as, release=release)

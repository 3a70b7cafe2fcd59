"""Reads and checks the settings of a run. Imports torch only if --use-checkpoint-args has to read a checkpoint."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.checkpoint.find import find_candidates
from megatron.checkpoint.step_source import OWN_STEPS, StepSource
from megatron.config import RunConfig, adopt_checkpoint_args, check_paths, check_settings
from megatron.config.cli import merge_sources
from megatron.config.notices import spelled
from megatron.config.refusals import Refusals
from megatron.config.sources import SettingsSource, no_other_file
from megatron.errors import ConfigError
from megatron.tokenizer_types import HUGGING_FACE, TOKENIZERS
from megatron.training.exit import rank_of_process
from megatron.utils.foreign import is_hugging_face

if TYPE_CHECKING:
    from megatron.checkpoint.found_step import FoundStep


def read_settings(
    argv: Sequence[str] | None,
    *,
    needs_data: bool = True,
    opens_files: bool = True,
    absent: Refusals | None = None,
    source: StepSource = OWN_STEPS,
    other_file: SettingsSource = no_other_file,
) -> RunConfig:
    """Reads, merges and checks all settings. With `needs_data=False` the script brings its own datasets. With
    `opens_files=False` the data and tokenizer files need not exist, because they are not read. Missing files and
    folders are added to `absent`, if given, instead of being rejected: they may be made before the launch. If --load is
    among them, the model's shape is unknown and the settings are not checked. `source` reads other programs'
    checkpoints."""
    refusals = Refusals()
    files = refusals if absent is None else absent
    config = merge_sources(argv, refusals, other_file)
    there = _check_load_is_there(config, files)
    if absent is not None and absent.lines:
        refusals.end()
        return config
    if not there and not config.model.num_layers:
        if opens_files:
            check_paths(config, refusals)
        refusals.end()  # without --load, the shape and the tokenizer are unknown
    theirs = config.checkpoint.load is not None and is_hugging_face(Path(config.checkpoint.load))
    if theirs or config.checkpoint.use_checkpoint_args:
        refusals.end()  # little can be checked without the model's shape
        adopt = partial(_with_settings_of_folder, needs_data=needs_data) if theirs else _with_checkpoint_args
        config = adopt(config, source)
    check_settings(config, needs_data=needs_data, refusals=refusals)
    if opens_files:
        check_paths(config, files)
    project = config.logging.wandb_project
    if project is not None and rank_of_process() == 0 and not _importable("wandb"):
        with refusals.of_checking():
            raise wandb_missing(project)
    refusals.end()
    return config


def _check_load_is_there(config: RunConfig, refusals: Refusals) -> bool:
    """Rejects a --load without a checkpoint, before its settings are reported as missing: an absent path, a name on the
    Hub, or a file without the model's shape. Any other file is checked when it is opened, together with the rest.
    Returns False if it rejected --load."""
    load, save = config.checkpoint.load, config.checkpoint.save
    if load is None or Path(load).is_dir() or (Path(load).exists() and config.model.num_layers):
        return True
    with refusals.of_checking():
        find_candidates(Path(load), save_dir=Path(save) if save else None)
        return True
    return False


def _importable(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # a module of that name was not imported from a file
        return sys.modules.get(package) is not None


def wandb_missing(project: str) -> ConfigError:
    return ConfigError(
        f"--wandb-project {project}: the package wandb is not installed; run `pip install wandb`, or remove the flag"
    )


def _with_checkpoint_args(config: RunConfig, source: StepSource) -> RunConfig:
    from megatron.checkpoint.found_step import describe_step

    if config.checkpoint.load is None:
        raise ConfigError("--use-checkpoint-args: requires a checkpoint; give --load")
    found = describe_step(
        Path(config.checkpoint.load),
        step=config.checkpoint.ckpt_step,
        save_dir=Path(config.checkpoint.save) if config.checkpoint.save else None,
        source=source,
    )
    if found is None:
        return config
    return _with_its_own_tokenizer(adopt_checkpoint_args(config, found.saved_settings()), found)


def _with_settings_of_folder(config: RunConfig, source: StepSource, *, needs_data: bool) -> RunConfig:
    """Takes shape, vocabulary and tokenizer from the Hugging Face model of --load."""
    checkpoint = config.checkpoint
    assert checkpoint.load is not None
    folder = Path(checkpoint.load)
    here = f"--load {folder}: holds a Hugging Face model"
    if not checkpoint.finetune:
        raise ConfigError(f"{here}, which has only weights and cannot be resumed; add --finetune to train from them")
    for name in ("ckpt_step", "strict_load", "skip_hash"):
        if config.given(name):
            raise ConfigError(f"{spelled(config, name)}: {here}, without steps and a manifest; remove it")
    if checkpoint.save is not None and Path(checkpoint.save).resolve() == folder.resolve():
        raise ConfigError(f"--save {checkpoint.save}: {here}; save to another directory")
    model = source.open_model(folder)
    has_tokenizer = (folder / "tokenizer.json").is_file()
    if needs_data and not (has_tokenizer or config.data.mock_data or _names_a_tokenizer(config)):
        raise ConfigError(
            f"{here} without tokenizer.json; copy the model's tokenizer.json there, or give --tokenizer-type"
        )
    adopted = adopt_checkpoint_args(config, model.settings(), way_out="remove it")
    theirs = "shape, vocabulary and tokenizer" if has_tokenizer else "shape and vocabulary"
    line = f"{here} ({model.model_type}): the model's {theirs} are taken from it"
    return replace(adopted, notices=(*adopted.notices, line))


def _names_a_tokenizer(config: RunConfig) -> bool:
    tokenizer = config.tokenizer
    return any(name is not None for name in (tokenizer.tokenizer_type, tokenizer.tokenizer_model, tokenizer.vocab_file))


def _with_its_own_tokenizer(config: RunConfig, found: "FoundStep") -> RunConfig:
    """Uses the checkpoint's own copy of a Hugging Face tokenizer: the original folder may no longer exist."""
    adopted, folder = config.origins.get("tokenizer_model") == "checkpoint", found.tokenizer
    if not adopted or TOKENIZERS[config.tokenizer.kind] is not HUGGING_FACE:
        return config
    if folder is None or not (folder / "tokenizer.json").is_file():
        return config
    return replace(config, tokenizer=replace(config.tokenizer, tokenizer_model=str(folder)))

"""Checks of data, tokenizer and checkpoint settings against each other."""

from __future__ import annotations

from megatron.config.meaning import given, spelled
from megatron.config.run import RunConfig
from megatron.config.sections.data import parse_blend, parse_split
from megatron.errors import ConfigError

_PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")


def check_paths_and_split(config: RunConfig) -> None:
    data = config.data
    parse_split(data.split)
    for name in ("data_path", *_PER_SPLIT):
        paths = getattr(data, name)
        if paths is not None:
            parse_blend(paths, "--" + name.replace("_", "-"))
    separate = [name for name in _PER_SPLIT if getattr(data, name) is not None]
    if data.data_path is not None and separate:
        raise ConfigError(f"--data-path and {spelled(config, separate[0])} exclude each other; keep one of them")
    if data.mock_data and (data.data_path is not None or separate):
        raise ConfigError("--mock-data and data paths exclude each other; keep one of them")
    if separate and given(config, "split"):
        raise ConfigError(
            f"{spelled(config, 'split')} and {spelled(config, separate[0])} exclude each other: separate sets are not "
            "split; remove --split"
        )


def check_sources(config: RunConfig) -> None:
    data = config.data
    if data.mock_data or data.data_path is not None:
        return
    if data.train_data_path is None and not config.training.skip_train:
        separate = [name for name in _PER_SPLIT if getattr(data, name) is not None]
        if separate:
            raise ConfigError(f"{spelled(config, separate[0])}: nothing to train on; add --train-data-path")
        raise ConfigError(
            "--data-path: no data is given; give the prefix of .bin/.idx files (tools/preprocess_data.py makes them), "
            "or --mock-data"
        )


def check_tokenizer(config: RunConfig) -> None:
    tokenizer = config.tokenizer
    if config.data.mock_data and tokenizer.tokenizer_type is None and tokenizer.vocab_file is None:
        if tokenizer.vocab_size is None:
            raise ConfigError("--mock-data: needs a vocabulary; add --vocab-size N or a tokenizer")
        return
    kind = tokenizer.kind
    if kind == "GPT2BPETokenizer":
        missing = [
            flag
            for flag, value in (("--vocab-file", tokenizer.vocab_file), ("--merge-file", tokenizer.merge_file))
            if value is None
        ]
        if missing:
            raise ConfigError(
                f"{' and '.join(missing)}: required by --tokenizer-type {kind}; "
                "give vocab.json and merges.txt, or choose another --tokenizer-type"
            )
    elif kind == "NullTokenizer":
        if tokenizer.vocab_size is None:
            raise ConfigError("--tokenizer-type NullTokenizer: needs --vocab-size; add it")
    elif tokenizer.tokenizer_model is None:
        raise ConfigError(f"--tokenizer-type {kind}: needs --tokenizer-model; give its file or directory")


def check_checkpoint(config: RunConfig) -> None:
    checkpoint = config.checkpoint
    if checkpoint.save is not None and checkpoint.save_interval is None:
        raise ConfigError(f"{spelled(config, 'save')}: how often? add --save-interval STEPS")
    if checkpoint.load is None:
        for name in ("ckpt_step", "finetune", "use_checkpoint_args", "perform_initialization"):
            if given(config, name) and getattr(checkpoint, name) != _DEFAULTS[name]:
                raise ConfigError(f"{spelled(config, name)}: there is no checkpoint to load; add --load DIR")
    retain, interval = checkpoint.save_retain_interval, checkpoint.save_interval
    if retain is not None and (interval is None or retain % interval):
        raise ConfigError(
            f"{spelled(config, 'save_retain_interval')} is no multiple of {spelled(config, 'save_interval')}; "
            "checkpoints to keep must be checkpoints that are saved"
        )


_DEFAULTS = {"ckpt_step": None, "finetune": False, "use_checkpoint_args": False, "perform_initialization": True}

CHECKS = (check_paths_and_split, check_checkpoint)

"""Checks of the file system: files that the settings name must exist before any work is done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron.config.run import RunConfig
from megatron.config.sections.data import parse_blend
from megatron.errors import ConfigError


def check_paths(config: RunConfig) -> None:
    """Data, tokenizer and configuration files exist. (A missing checkpoint is the checkpoint reader's to judge.)"""
    for flag, path, hint in _named_files(config):
        if not path.is_file():
            raise ConfigError(f"{flag} {path}: no such file; {hint}")
    model = config.tokenizer.tokenizer_model
    if model is not None and not Path(model).exists():
        raise ConfigError(
            f"--tokenizer-model {model}: no such file or directory; give a tokenizer.json or its directory "
            "(nothing is downloaded)"
        )
    for flag, directory in (("--save", config.checkpoint.save), ("--tensorboard-dir", config.logging.tensorboard_dir)):
        if directory is not None and Path(directory).is_file():
            raise ConfigError(f"{flag} {directory}: is a file; give a directory")


def _named_files(config: RunConfig) -> Iterator[tuple[str, Path, str]]:
    tokenizer, data = config.tokenizer, config.data
    for flag, name in (("--vocab-file", tokenizer.vocab_file), ("--merge-file", tokenizer.merge_file)):
        if name is not None:
            yield flag, Path(name), "check the path (tools/train_tokenizer.py makes vocab.json and merges.txt)"
    for flag, paths in (
        ("--data-path", data.data_path),
        ("--train-data-path", data.train_data_path),
        ("--valid-data-path", data.valid_data_path),
        ("--test-data-path", data.test_data_path),
    ):
        for _, prefix in parse_blend(paths, flag) if paths is not None else ():
            for suffix in (".idx", ".bin"):
                yield (
                    flag,
                    Path(prefix + suffix),
                    "give the prefix without .bin/.idx (tools/preprocess_data.py makes them)",
                )

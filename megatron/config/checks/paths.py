"""Checks that the files which the settings name exist, before any work is done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron.config.blend import data_sources
from megatron.config.run import RunConfig
from megatron.errors import ConfigError


def check_paths(config: RunConfig) -> None:
    """Data, tokenizer and configuration files exist. (Checkpoints are checked by the code that loads them.)"""
    for flag, path, hint in _named_files(config):
        if path.is_dir():
            raise ConfigError(f"{flag} {path}: is a directory; name the file in it")
        if not path.exists():
            raise ConfigError(f"{flag} {path}: no such file; {hint}")
        if not path.is_file():  # a pipe can be read only once, by one rank
            raise ConfigError(f"{flag} {path}: not a regular file; copy its content to a file and name that")
    model = config.tokenizer.tokenizer_model
    if model is not None and not Path(model).exists():
        raise ConfigError(
            f"--tokenizer-model {model}: no such file or directory; give a tokenizer.json or its directory "
            "(nothing is downloaded)"
        )
    for flag, directory in (
        ("--save", config.checkpoint.save),
        ("--tensorboard-dir", config.logging.tensorboard_dir),
        ("--data-cache-path", config.data.data_cache_path),
    ):
        if directory is not None:
            _refuse_file_on_the_way(flag, directory)
    for flag, file in (
        ("--metrics-jsonl", config.logging.metrics_jsonl),
        ("--data-table-path", config.data.data_table_path),
    ):
        if file is not None and Path(file).is_dir():
            raise ConfigError(f"{flag} {file}: is a directory; name a file in it")


def _refuse_file_on_the_way(flag: str, directory: str) -> None:
    for path in (Path(directory), *Path(directory).parents):
        if path.is_file():
            which = "" if path == Path(directory) else f"{path} "
            raise ConfigError(f"{flag} {directory}: {which}is a file; give a directory")


def _named_files(config: RunConfig) -> Iterator[tuple[str, Path, str]]:
    tokenizer, data = config.tokenizer, config.data
    for flag, name in (("--vocab-file", tokenizer.vocab_file), ("--merge-file", tokenizer.merge_file)):
        if name is not None:
            yield flag, Path(name), "check the path (tools/train_tokenizer.py makes vocab.json and merges.txt)"
    for flag, path in (
        ("--data-args-path", data.data_args_path),
        ("--per-split-data-args-path", data.per_split_data_args_path),
    ):
        if path is not None:
            yield flag, Path(path), "give the file that lists the sources"
    for blend in dict.fromkeys(data_sources(data).blends):
        if blend is None:
            continue
        for prefix in blend.prefixes:
            without = f" {prefix[:-4]}," if prefix.endswith((".idx", ".bin")) else ""
            for suffix in (".idx", ".bin"):
                yield (
                    blend.flag,
                    Path(prefix + suffix),
                    f"give the prefix{without} without .bin/.idx (tools/preprocess_data.py makes them)",
                )

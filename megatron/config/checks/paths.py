"""Checks that the files of the settings exist, before any work starts."""

from collections.abc import Iterator
from pathlib import Path

from megatron.config.blend import data_sources, fetch_first, prefix_meant
from megatron.config.refusals import Refusals
from megatron.config.run import RunConfig, all_settings
from megatron.config.text_as_data import fix_of_prefix
from megatron.errors import ConfigError
from megatron.utils.foreign import tokenizer_on_hub


def check_paths(config: RunConfig, refusals: Refusals | None = None) -> None:
    """Checks that data, tokenizer and configuration files exist. Checkpoints are checked when they are loaded.

    `refusals` collects the errors; without it they are raised.
    """
    found = Refusals() if refusals is None else refusals
    with found.of_checking():  # paths inside a file may be wrong too
        for error in _wrong_paths(config):
            with found.of_checking():
                raise error
    if refusals is None:
        found.end()


def _unusable_paths(config: RunConfig) -> Iterator[ConfigError]:
    """Yields an error for each path that is invalid or that this user may not access."""
    for setting in (setting for setting in all_settings() if setting.flag.path):
        value = config.value(setting)
        for path in (value,) if isinstance(value, str) else value or ():
            try:
                Path(path).stat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                yield ConfigError(f"{setting.spelling} {path}: {reason}; name another path")


def _wrong_paths(config: RunConfig) -> Iterator[ConfigError]:
    unusable = list(_unusable_paths(config))
    yield from unusable
    if unusable:
        return  # the checks below would fail for the same reason
    told: set[tuple[Path, str]] = set()  # a prefix has two files; reporting one is enough
    for flag, path, hint in _named_files(config):
        line = _wrong_file(f"{flag} {path}", path, hint)
        if line is not None and (path.parent, path.stem) not in told:
            told.add((path.parent, path.stem))
            yield ConfigError(line)
    for blend in filter(None, dict.fromkeys(data_sources(config.data).blends)):
        yield from (ConfigError(fetch_first(blend.flag, prefix)) for prefix in blend.prefixes if "://" in prefix)
        fixes = (
            {} if config.data.sft else {prefix: fix_of_prefix(config, blend.flag, prefix) for prefix in blend.prefixes}
        )
        yield from (ConfigError(f"{blend.flag} {prefix}: {fix}") for prefix, fix in fixes.items() if fix is not None)
    model = config.tokenizer.tokenizer_model
    if model is not None and not Path(model).exists():
        yield ConfigError(
            f"--tokenizer-model {model}: no such file or directory; give a tokenizer.json or its directory (nothing is "
            f"downloaded){tokenizer_on_hub(model)}"
        )
    for flag, directory in (
        ("--save", config.checkpoint.save),
        ("--non-persistent-global-ckpt-dir", config.checkpoint.non_persistent_global_ckpt_dir),
        ("--non-persistent-local-ckpt-dir", config.checkpoint.non_persistent_local_ckpt_dir),
        ("--tensorboard-dir", config.logging.tensorboard_dir),
        ("--data-cache-path", config.data.data_cache_path),
        ("--optimizer-offload-directory", config.optimizer.optimizer_offload_directory),
    ):
        file = _file_on_the_way(directory)
        if file is not None:
            which = "" if file == Path(str(directory)) else f"{file} "
            yield ConfigError(f"{flag} {directory}: {which}is a file; give a directory")
    for flag, name in (
        ("--metrics-jsonl", config.logging.metrics_jsonl),
        ("--data-table-path", config.data.data_table_path),
    ):
        if name is None:
            continue
        if Path(name).is_dir():
            yield ConfigError(f"{flag} {name}: is a directory; name a file in it")
        if (file := _file_on_the_way(str(Path(name).parent))) is not None:
            yield ConfigError(f"{flag} {name}: {file} is a file, not a directory; give another path")


def _wrong_file(named: str, path: Path, hint: str) -> str | None:
    if path.is_dir():
        return f"{named}: is a directory; name the file in it"
    if not path.exists():
        return f"{named}: no such file; {hint}"
    if not path.is_file():  # a pipe can be read only once, by one rank
        return f"{named}: not a regular file; copy its content to a file and give that file"
    return None


def _file_on_the_way(directory: str | None) -> Path | None:
    path = None if directory is None else Path(directory)
    return next((place for place in (path, *path.parents) if place.is_file()), None) if path is not None else None


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
            if "://" in prefix:
                continue
            if data.sft:
                yield blend.flag, Path(prefix), "give a JSONL file of conversations"
                continue
            for suffix in () if fix_of_prefix(config, blend.flag, prefix) else (".idx", ".bin"):
                file = Path(prefix + suffix)
                yield blend.flag, file, "" if file.exists() else prefix_meant(prefix)

"""Checks of data and tokenizer settings against each other."""

from megatron.config.blend import data_sources, parse_blend
from megatron.config.notices import spelled
from megatron.config.run import RunConfig
from megatron.config.split import parse_split
from megatron.config.validation import asked_samples, set_names
from megatron.errors import ConfigError
from megatron.tokenizer_types import TOKENIZERS

_SHARED = ("data_path", "data_args_path")
_SEPARATE = ("train_data_path", "valid_data_path", "test_data_path")
_SEPARATE_FILE = ("per_split_data_args_path",)


def _given(config: RunConfig, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if getattr(config.data, name) is not None]


def check_paths_and_split(config: RunConfig) -> None:
    """Checks the syntax of data paths and --split. `check_paths` checks the files."""
    data = config.data
    shares = parse_split(data.split)
    for name in ("data_path", *_SEPARATE):
        words = getattr(data, name)
        if words is not None:
            parse_blend("--" + name.replace("_", "-"), words)
    if not shares[0] and (data.mock_data or _given(config, _SHARED)) and not config.training.skip_train:
        raise ConfigError(f"{spelled(config, 'split')}: leaves nothing to train on; give training a share above 0")


def check_validation_sets(config: RunConfig) -> None:
    data, evaluation = config.data, config.evaluation
    if data.multiple_validation_sets:
        _check_sets(config)
    samples = asked_samples(config)
    if samples is not None and evaluation.full_validation and len(samples) == len(set_names(config)):
        raise ConfigError(
            f"{spelled(config, 'validation_samples')} and --full-validation exclude each other: the former reads part "
            "of every set, the latter all of it; keep one"
        )


def _check_sets(config: RunConfig) -> None:
    data = config.data
    sources = data_sources(data)
    blend = None if sources.cut or data.mock_data else sources.blends[1]
    if blend is None:
        raise ConfigError("--multiple-validation-sets: needs --valid-data-path; give the prefixes of the sets")
    if blend.weights is not None:
        raise ConfigError(
            f"--multiple-validation-sets: {blend.flag} has weights, but sets are not mixed; remove the weights"
        )
    names = data.validation_set_names
    if names is None:
        return
    flag = spelled(config, "validation_set_names")
    if len(names) != len(blend.prefixes):
        raise ConfigError(
            f"{flag}: {len(names)} names, but {blend.flag} has {len(blend.prefixes)} sets; give one name per set"
        )
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ConfigError(f"{flag}: two sets are called {name}; give each a different name")
        if "=" in name:
            raise ConfigError(f"{flag}: {name} contains =, which --validation-samples could not parse; rename the set")


def check_fill_in_the_middle(config: RunConfig) -> None:
    data = config.data
    if not data.fim_data:
        return
    if (data.fim_split_sample is None) != (data.fim_fragment_rate is None):
        raise ConfigError(
            "--fim-split-sample TOKEN and --fim-fragment-rate RATE need each other: the token splits a document "
            "into fragments, and the rate is the share of fragments to rearrange; give both or neither"
        )
    if config.tokenizer.tokenizer_type == "NullTokenizer" or (
        data.mock_data and config.tokenizer.tokenizer_type is None and config.tokenizer.vocab_file is None
    ):
        raise ConfigError(
            "--fim-data: needs a text tokenizer, but this run has none; give a tokenizer, or remove --fim-data"
        )


def check_sources(config: RunConfig) -> None:
    data = config.data
    separate = _given(config, _SEPARATE)
    if data.mock_data or _given(config, (*_SHARED, *_SEPARATE_FILE)):
        return
    if data.train_data_path is None and not config.training.skip_train:
        if separate:
            raise ConfigError(f"{spelled(config, separate[0])}: nothing to train on; add --train-data-path")
        raise ConfigError(
            "--data-path: no data is given; give the prefix of .bin/.idx files (tools/preprocess_data.py makes them), "
            "or --mock-data"
        )


def check_tokenizer_flags(config: RunConfig) -> None:
    tokenizer = config.tokenizer
    if config.data.mock_data and tokenizer.tokenizer_type is None and tokenizer.vocab_file is None:
        if tokenizer.vocab_size is None:
            raise ConfigError("--mock-data: needs a vocabulary size; add --vocab-size N or a tokenizer")
        return
    if (missing := TOKENIZERS[tokenizer.kind].missing(tokenizer.kind, tokenizer)) is not None:
        raise ConfigError(f"{missing}; add it, or choose another --tokenizer-type")


def check_seed(config: RunConfig) -> None:
    if config.training.seed >= 2**32 and any(_given(config, (*_SHARED, *_SEPARATE, *_SEPARATE_FILE))):
        raise ConfigError(
            f"{spelled(config, 'seed')}: the sample order needs a seed from 0 to {2**32 - 1}; choose another seed"
        )


CHECKS = (check_seed, check_paths_and_split, check_validation_sets, check_fill_in_the_middle)

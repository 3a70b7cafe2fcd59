"""Parsing of data blends and --split, on the command line and in files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron.config import DataConfig
from megatron.config.blend import Blend, data_sources, parse_blend
from megatron.config.split import parse_split
from megatron.errors import ConfigError

Weights = tuple[float, ...] | None


@pytest.mark.parametrize(
    ("words", "prefixes", "weights"),
    [
        (["a"], ("a",), None),
        (["7"], ("7",), None),  # one word is a prefix, whatever it looks like
        (["1", "a"], ("a",), (1.0,)),
        (["0.3", "a", " 0.7 ", " b "], ("a", "b"), (0.3, 0.7)),
        (["a", "b"], ("a", "b"), None),
        (["a", "b", "c"], ("a", "b", "c"), None),
        (["1e-3", "7"], ("7",), (0.001,)),
        (["0.5", "a", "0.5", "a"], ("a", "a"), (0.5, 0.5)),
    ],
)
def test_words(words: list[str], prefixes: tuple[str, ...], weights: Weights) -> None:
    assert parse_blend("--data-path", words) == Blend("--data-path", prefixes, weights)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["0", "a", "1", "b"], "--valid-data-path 0 a 1 b: the weight 0 of a is not a positive number; remove that"),
        (["-1", "a"], "the weight -1 of a is not a positive number"),
        (["nan", "a"], "the weight nan of a"),
        (["inf", "a"], "the weight inf of a"),
        (["0.5", "a", "b", "c"], "'b', before 'c', is not a number"),
        (
            ["a", "0.5", "b", "0.5"],
            "'a', before '0.5', is not a number; give one PREFIX, several PREFIX, or WEIGHT PREFIX",
        ),
        (["0.5", "a", "b"], "3 values, an odd number, cannot be pairs"),
        (["", "a"], "a path is empty"),
        ([], "a path is empty"),
        (
            [f"p{i}" for i in range(32768)],
            "--valid-data-path p0 p1 p2 p3 p4 p5 p6 p7 ...: 32768 sources, above the limit of 32767",
        ),
    ],
)
def test_bad_words(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_blend("--valid-data-path", words)


@pytest.mark.parametrize("text", ["x", "1,2,3,4", "0,0", "-1,2", "nan", "inf,1", "", "1e308,1e308,1e308"])
def test_bad_splits(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--split {text}: ") + ".* as in --split 969,30,1"):
        parse_split(text)


def sources(**settings: object) -> tuple[Blend | None, ...]:
    return data_sources(DataConfig(seq_length=8, **settings)).blends  # type: ignore[arg-type]


def test_a_file_says_what_the_command_line_would(tmp_path: Path) -> None:
    file = tmp_path / "mixture.txt"
    file.write_text("0.3 web\n0.7\tcode\n\n")
    typed, read = sources(data_path=("0.3", "web", "0.7", "code")), sources(data_args_path=str(file))
    assert data_sources(DataConfig(seq_length=8, data_args_path=str(file))).cut
    for one, other in zip(typed, read, strict=True):
        assert one is not None and other is not None
        assert (one.prefixes, one.weights) == (other.prefixes, other.weights)


def test_a_file_with_the_mixture_of_each_split(tmp_path: Path) -> None:
    file = tmp_path / "splits.json"
    file.write_text(json.dumps({"train": ["0.3", "web", 0.7, "code"], "valid": ["v"], "test": None}))
    train, valid, test = sources(per_split_data_args_path=str(file))
    assert train is not None and (train.prefixes, train.weights) == (("web", "code"), (0.3, 0.7))
    assert valid is not None and (valid.prefixes, valid.weights) == (("v",), None)
    assert test is None
    assert not data_sources(DataConfig(seq_length=8, per_split_data_args_path=str(file))).cut


@pytest.mark.parametrize(
    ("setting", "content", "message"),
    [
        ("data_args_path", b" \n", "the file is empty"),
        ("data_args_path", b"\xff\xfe", "not UTF-8"),
        ("data_args_path", b"0.5 a b", "3 values, an odd number"),
        ("per_split_data_args_path", b"0.5 a", "not JSON"),
        ("per_split_data_args_path", b"[]", "not an object whose keys are among train, valid, test"),
        ("per_split_data_args_path", b'{"validation": ["a"]}', "not an object whose keys"),
        ("per_split_data_args_path", b'{"train": "a"}', "train is not a list of weights and prefixes"),
        ("per_split_data_args_path", b'{"train": [true, "a"]}', "train is not a list"),
        ("per_split_data_args_path", b'{"train": ["0", "a"]}', "train 0 a: the weight 0 of a"),
        ("per_split_data_args_path", b"[" * 100_000, "not JSON"),
    ],
)
def test_files_that_say_nothing_sensible(tmp_path: Path, setting: str, content: bytes, message: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--{setting.replace('_', '-')} .*file.*{re.escape(message)}"):
        sources(**{setting: str(file)})


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--data-args-path .*: cannot be read"):
        sources(data_args_path=str(tmp_path / "none"))

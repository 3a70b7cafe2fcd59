"""Untrusted --per-split-data-args-path and --data-args-path files give a blend, or one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron.config import parse_args
from megatron.config.blend import data_sources, given_sets
from tests.helpers.mutations import only_our_errors, texts
from tests.unit.config.commands import SMALL, argv

CONTENT = {"train": ["0.3", "web", 0.7, "code"], "valid": ["web_valid"], "test": [1, "a", 2.5, "b"]}


def reader(field: str, path: Path) -> Callable[[str], None]:
    ours = parse_args(argv(SMALL, "--seq-length 32 --micro-batch-size 1 --lr 1e-4 --train-iters 10 --mock-data"))
    data = replace(ours.data, mock_data=False, **{field: str(path)})

    def read(text: str) -> None:
        path.write_text(text, encoding="utf-8")
        given_sets(data)
        for blend in data_sources(data).blends:
            assert blend is None or all(weight > 0 for weight in blend.weights or ())

    return read


def test_files_of_three_splits(tmp_path: Path) -> None:
    taken, refused = only_our_errors(
        reader("per_split_data_args_path", tmp_path / "splits.json"), texts(CONTENT, 400, 16)
    )
    assert taken and refused


def test_files_of_one_blend(tmp_path: Path) -> None:
    only_our_errors(reader("data_args_path", tmp_path / "blend.txt"), texts(CONTENT, 100, 17))

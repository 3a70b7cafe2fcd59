"""Checks that launch scripts run before they start anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.cli.check_launch import check_launch, main
from megatron.errors import ConfigErrors
from tests.helpers.runs import flags

ABSENT = {"mock_data": None, "vocab_size": None}
ABSENT |= {"data_path": "no/data", "vocab_file": "no/vocab.json", "merge_file": "no/merges.txt"}


def test_files_that_are_not_there_are_no_mistake_of_a_plan() -> None:
    with pytest.raises(ConfigErrors):
        check_launch(2, flags(**ABSENT))
    lines = check_launch(2, flags(**ABSENT, dry_run=True))
    assert [line.split()[0] for line in lines] == ["--vocab-file", "--merge-file", "--data-path"]
    assert check_launch(2, flags(dry_run=True)) == ()


@pytest.mark.parametrize("mistake", [{"hidden_size": 33}, {"micro_batch_size": 3}], ids=["a setting", "the ranks"])
def test_other_mistakes_are(mistake: dict[str, int], capsys: pytest.CaptureFixture[str]) -> None:
    (name,) = mistake
    for files in ({}, ABSENT):
        assert main(["2", *flags(**{**files, **mistake}, dry_run=True)]) == 2
        said = capsys.readouterr()
        assert not said.out and said.err.count("error: ") == 1 and f"--{name.replace('_', '-')} " in said.err


def test_all_is_said_at_once_before_a_launch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["2", *flags(**ABSENT, hidden_size=33)]) == 2
    assert capsys.readouterr().err.count("error: ") == 4
    assert main(["2", *flags(**ABSENT, dry_run=True)]) == 0
    assert capsys.readouterr().out.count("before a launch: --") == 3


def test_a_model_that_is_not_there_leaves_the_rest_unchecked(tmp_path: Path) -> None:
    (line,) = check_launch(2, flags(load=tmp_path / "model", finetune=True, num_layers=None, dry_run=True))
    assert "does not exist" in line

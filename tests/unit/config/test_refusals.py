"""One launch reports all mistakes of a command line, a line each, but none that only follows from another."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from megatron.config import check_paths, parse_args
from megatron.config.refusals import Refusals
from megatron.config.run import all_settings
from megatron.errors import ConfigError
from tests.helpers.runs import flags, launch
from tests.unit.config.commands import SMALL, argv


def lines(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_args(argv(SMALL, *words))
    assert caught.value.exit_code == 2
    return list(caught.value.lines)


def test_every_kind_of_mistake_has_its_line() -> None:
    told = lines(
        "stray --seed x --optimizer soap --swiglu 3 --swiglu=maybe -lr 4 --fp16 --bf16",
        "--clip-grad --num-query-groups 3 --rampup-batch-size 1 2",
    )
    begins = [
        "unexpected argument 'stray'",
        "unexpected argument '3' after --swiglu",
        "--swiglu=maybe: a switch is true or false",
        "-lr: flags begin with two dashes; give --lr",
        "--clip-grad: needs one value",
        "--rampup-batch-size: needs 3 values",
        "--seed x: not a whole number",
        "--optimizer soap: not supported yet",
        "--num-attention-heads 4 is not divisible by --num-query-groups 3",
        "--fp16 and --bf16 exclude each other",
    ]
    assert len(told) == len(begins)
    for begin in begins:
        assert sum(line.startswith(begin) for line in told) == 1, (begin, told)


@pytest.mark.parametrize(
    ("mistakes", "count"),
    [
        ("--lr x", 1),  # not that --lr is required
        ("--lr x --lr y", 2),
        ("--num-layers x --num-layers=", 2),
        ("--seq-length x --num-workers y", 2),
        ("--model gpt2 --hidden-size 66", 1),  # the shape is unknown without the preset
        ("--config nowhere.yaml", 1),
        ("--yaml-cfg run.yaml --hidden-size 66", 1),
        ("--moe-layer-freq abc --num-experts 4 --disable-bias-linear", 1),
        ("--min-los-scale 3 --fp16 --min-loss-scale 1e30", 1),
    ],
)
def test_what_follows_from_a_refusal_is_not_said(mistakes: str, count: int) -> None:
    assert len(lines(mistakes)) == count


def test_a_misspelled_flag_is_not_said_to_be_missing() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(argv(SMALL.replace("--num-layers", "--num-layer").replace("--hidden-size 64", "")))
    (spelled,) = caught.value.lines
    assert spelled.startswith("--num-layer: unknown setting")


def test_mistakes_of_a_file_and_of_the_command_line_are_told_together(tmp_path: Path) -> None:
    (file := tmp_path / "run.yaml").write_text("lr: x\nnum-workrs: 3\n")
    told = lines(f"--config {file} --seed y")
    assert [line.partition(":")[0] for line in told] == ["--seed y", f"in {file}", f"in {file}"]


def test_every_pair_of_bad_values_gives_both_lines() -> None:
    """Rejects one value at a time the same way as two at once."""
    numbers = [s.spelling for s in all_settings() if s.base in (int, float) and not s.many and s.flag.status == "works"]
    assert len(numbers) > 90
    for one, other in pairwise(numbers):
        alone = [lines(f"{flag} x") for flag in (one, other)]
        assert lines(f"{one} x {other} x") == [line for told in alone for line in told]


def test_missing_files_are_told_together(tmp_path: Path) -> None:
    command = SMALL.replace("--mock-data --vocab-size 100", f"--data-path 1 {tmp_path}/a 1 {tmp_path}/b")
    others = f"--vocab-file {tmp_path}/v --merge-file {tmp_path}/m --save {__file__}/x --save-interval 1"
    config = parse_args(argv(command, others))
    with pytest.raises(ConfigError) as caught:
        check_paths(config)
    assert [line.split()[0] for line in caught.value.lines] == [
        "--vocab-file",
        "--merge-file",
        "--data-path",
        "--data-path",
        "--save",
    ]


def test_a_check_that_fails_otherwise_says_nothing_new() -> None:
    refusals = Refusals()
    with pytest.raises(ZeroDivisionError), refusals.of_checking():
        raise ZeroDivisionError  # without a refusal it is a bug, and is seen
    refusals.refuse(ConfigError("--num-layers x: not a whole number; give one"))
    with refusals.of_checking():
        raise ZeroDivisionError
    with refusals.of_checking():
        raise ConfigError("--seed 3 does not fit --num-layers 0; change it")
    with pytest.raises(ConfigError, match=r"^--num-layers x: not a whole number; give one$"):
        refusals.end()


def test_the_program_prints_one_error_a_line() -> None:
    done = launch([*flags(), "--lr", "x", "--seed", "y"])
    assert done.returncode == 2
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["error", "error"]
    assert done.stderr.splitlines()[1].startswith("error: --seed y: not a whole number; ")

"""Settings that exclude each other: every pair of the table is rejected, but not for one setting alone. The table was
made from all pairs of 431 settings with values, when each exclusion had its own check. Its first column names the
command to which a pair is added."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config import parse_args
from megatron.config.flag import Need
from megatron.config.run import all_settings, settings_by_name
from megatron.errors import ConfigError
from tests.unit.config.commands import SMALL, argv

FILES = "--data-path d --vocab-file v --merge-file m"
COMMANDS = {
    "iterations": SMALL,
    "samples": SMALL.replace("--train-iters 100", "--train-samples 1000"),
    "no length": SMALL.replace("--train-iters 100", "--skip-train"),
    "files": SMALL.replace("--mock-data --vocab-size 100", FILES),
    "separate files": SMALL.replace("--mock-data --vocab-size 100", FILES.replace("--data-path", "--train-data-path")),
    "no data": SMALL.replace("--mock-data", ""),
    "rope": f"{SMALL} --position-embedding-type rope",
    "experts": f"{SMALL} --num-experts 4 --disable-bias-linear",
}
TABLE = [line.split("\t") for line in Path(__file__).with_name("excluded_pairs.tsv").read_text().splitlines()]


def refusals(command: str, *words: str) -> set[str]:
    try:
        parse_args(argv(command, *words))
    except ConfigError as error:
        return set(error.lines)
    return set()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_pair_is_rejected(command: str) -> None:
    base = COMMANDS[command]
    pairs = [(one, other) for name, one, other in TABLE if name == command]
    assert pairs
    for one, other in pairs:
        assert refusals(base, one, other) - refusals(base, one) - refusals(base, other), (one, other)


def test_every_declared_pair_is_in_the_table() -> None:
    """One row contains both settings, or one setting and what the other needs."""
    rows = [f"{COMMANDS[name]} {one} {other}" for name, one, other in TABLE]
    for setting in all_settings():
        for exclude in setting.flag.excludes:
            other = exclude.other
            words = (
                other.text.split()[0].replace("recomputation", "--recompute")
                if isinstance(other, Need)
                else settings_by_name()[other].spelling
            )
            assert any(f"{setting.spelling} " in f"{row} " and words in row for row in rows), (setting.name, words)

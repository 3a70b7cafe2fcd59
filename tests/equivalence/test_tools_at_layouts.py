"""Tools that read a checkpoint work for any layout. Generation gives the text of the same model saved by one process.
Verification finds the damaged or missing file of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.cli.verify_checkpoint import main as verify
from tests.equivalence.test_export_from_layouts import MOE, ONE_GROUP, save
from tests.equivalence.test_model_parallel import GPT2, SP, layout
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import flags, generate_here
from tests.unit.tokenizer.support import write_small_bpe

Capture = pytest.CaptureFixture[str]
LAYOUTS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "tp2": (GPT2, 2, layout(tp=2)),
    "tp2 pp2": (GPT2, 4, layout(tp=2, pp=2)),
    "one group tp4": (ONE_GROUP, 4, layout(tp=4, **SP)),
    "moe ep2 tp2": (MOE, 4, layout(tp=2, expert_model_parallel_size=2)),
}


def saved(ranks: int, folder: Path, settings: dict[str, Any]) -> Path:
    folder.mkdir()
    vocab, merges = write_small_bpe(folder)
    named = {"vocab_size": None, "vocab_file": vocab, "merge_file": merges, "make_vocab_size_divisible_by": 8}
    run_ranks(ranks, save, ranks, flags(**settings, **named, save=folder / "run", save_interval=1))
    return folder / "run"


def text_of(run: Path, capsys: Capture) -> str:
    assert generate_here("--load", run, "--prompt", "for i in", "--max-new-tokens", 8, "--greedy") == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_text_is_that_of_one_process(name: str, tmp_path: Path, capsys: Capture) -> None:
    family, ranks, axes = LAYOUTS[name]
    split = text_of(saved(ranks, tmp_path / "split", {**family, **axes}), capsys)
    assert split == text_of(saved(1, tmp_path / "alone", family), capsys)
    assert split.startswith("for i in") and len(split) > len("for i in\n")


def test_every_ranks_file_is_verified(tmp_path: Path, capsys: Capture) -> None:
    family, ranks, axes = LAYOUTS["tp2 pp2"]
    run = saved(ranks, tmp_path / "split", {**family, **axes})
    assert verify([str(run), "--deep"]) == 0
    assert capsys.readouterr().out.startswith("iter_0000000: good\n")
    files = sorted(run.rglob("model_optim_rng.pt"))
    assert len(files) == 4
    for file in files:
        whole = file.read_bytes()
        damaged = bytearray(whole)
        damaged[len(damaged) // 2] ^= 1
        file.write_bytes(damaged)
        assert verify([str(run)]) == 1
        assert file.parent.name in capsys.readouterr().out
        file.unlink()
        assert verify([str(run)]) == 4
        assert file.parent.name in capsys.readouterr().out
        file.write_bytes(whole)
    assert verify([str(run)]) == 0

"""Two machines must read the same data, in any folder: they compare it once it is open."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from pathlib import Path

import numpy as np

from tests.distributed.test_launchers import ROOT, free_port, rank_env
from tests.helpers.runs import flags
from tests.helpers.warm import warm_python
from tests.unit.data.oracle import random_documents, write_dataset

MACHINE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": socket.gethostname()}


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def train(folders: list[Path], **changes: object) -> list[subprocess.CompletedProcess[str]]:
    """Runs one process per machine, as started by hand, each with its data in its own folder."""
    port = free_port()
    ranks = []
    for rank, folder in enumerate(folders):
        settings = {"mock_data": None, "tokenizer_type": "NullTokenizer", "data_path": folder / "corpus", **changes}
        command = [warm_python(), str(ROOT / "pretrain_gpt.py"), *flags(train_iters=2, **settings)]
        env = {**rank_env(rank, port), **MACHINE}
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    return [
        subprocess.CompletedProcess(rank.args, rank.returncode, *said)
        for rank, said in zip(ranks, outputs, strict=True)
    ]


def first_machine(tmp_path: Path) -> Path:
    (tmp_path / "a").mkdir()
    write_dataset(tmp_path / "a" / "corpus", random_documents(0, 60, 30, vocab=97))
    return tmp_path / "a"


def test_other_tokens_in_a_file_of_the_same_name_and_size_are_refused_by_name(tmp_path: Path) -> None:
    here = first_machine(tmp_path)
    there = copied(here, tmp_path / "b")
    tokens = np.fromfile(there / "corpus.bin", dtype=np.uint16)
    (tokens[::-1]).tofile(there / "corpus.bin")
    done = train([here, there])
    assert [each.returncode for each in done] == [11, 11], done
    for each in done:
        (line,) = [line for line in each.stderr.splitlines() if line.startswith("error")]
        assert re.search(r"rank [01] \(\S+\) reads other data than rank [01] \(", line), line
        assert "source 1 is " in line and str(here / "corpus") in line and str(there / "corpus") in line, line
        assert "copy" in line


def test_copies_in_other_places_are_the_same_data(tmp_path: Path) -> None:
    here = first_machine(tmp_path)
    done = train([here, copied(here, tmp_path / "b")])
    assert [each.returncode for each in done] == [0, 0], done


def test_a_machine_without_its_data_ends_the_others_too(tmp_path: Path) -> None:
    here = first_machine(tmp_path)
    there = copied(here, tmp_path / "b")
    with open(there / "corpus.bin", "r+b") as tokens:
        tokens.truncate(100)
    done = train([here, there], heartbeat_timeout_seconds=3)
    assert done[1].returncode == 11 and "corpus.bin" in done[1].stderr, done
    assert done[0].returncode == 17 and "rank 1 " in done[0].stderr, done

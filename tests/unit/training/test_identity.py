"""Ranks compare settings except paths, code, tokenizer and torch when they meet; then the data."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
import torch.distributed as dist

from megatron.config.run import all_settings
from megatron.data.datasets import Datasets
from megatron.data.sources import SourceContent
from megatron.distributed.identity import Identity
from megatron.distributed.launch import LaunchInfo
from megatron.errors import DataError
from megatron.tokenizer import build_tokenizer
from megatron.training import identity
from megatron.training.identity import meet_over_data, started_with
from megatron.training.settings import read_settings
from tests.helpers.runs import flags

MACHINES = LaunchInfo(world_size=8, local_world_size=2)


def of(launch: LaunchInfo = MACHINES, **changes: object) -> dict[str, str]:
    return started_with(read_settings(flags(**changes), needs_data=False), launch)


def test_a_setting_shows_and_a_path_does_not(tmp_path: Path) -> None:
    usual, other_lr, other_seed = of(), of(lr=0.1234), of(seed=99)
    assert of() == usual
    assert {name for name in usual if other_lr[name] != usual[name]} == {"--lr"}
    assert {name for name in usual if other_seed[name] != usual[name]} == {"--seed"}
    assert of(tensorboard_dir=tmp_path / "tb", data_cache_path=tmp_path / "cache") == usual


def test_checkpoints_show_and_their_places_do_not(tmp_path: Path) -> None:
    """A rank with --load or --save enters collectives that a rank without them never enters."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    assert of(save=here) == of(save=there) != of()
    assert of(load=here) == of(load=there) != of()
    assert of(load=here, save=there) == of(load=there, save=here) != of(load=here, save=here)
    assert of(load=here, save=here) == of(load=there, save=there)


def test_on_one_machine_the_places_of_checkpoints_show(tmp_path: Path) -> None:
    here, there, link = tmp_path / "here", tmp_path / "there", tmp_path / "link"
    here.mkdir(), there.mkdir(), link.symlink_to(here)

    def on_one(**changes: object) -> dict[str, str]:
        return of(LaunchInfo(world_size=2, local_world_size=2), **changes)

    assert on_one(save=here) == on_one(save=link) != on_one(save=there)
    assert on_one(load=here) == on_one(load=link) != on_one(load=there)


def test_machines_with_different_numbers_of_ranks_copy_to_the_same_ones(tmp_path: Path) -> None:
    """4, 2 and 2 ranks: the first machine would exchange shares over 4 ranks, the others over 2."""
    local = {"non_persistent_ckpt_type": "local", "non_persistent_local_ckpt_dir": tmp_path, "save": tmp_path / "save"}
    launches = [LaunchInfo(rank=rank, world_size=8, local_world_size=size) for rank, size in ((0, 4), (4, 2))]
    first, other = (of(launch, replication=True, **local) for launch in launches)
    told = Identity(4, other).difference(Identity(0, first), "rank 0", "rank 4")
    name = "--replication-jump (default: the ranks per machine; give the same number everywhere)"
    assert f": {name} is 4 on rank 0 and 2 on rank 4; " in told
    first, other = (of(launch, replication=True, replication_jump=4, **local) for launch in launches)
    assert first == other
    assert of(launches[0], **local) == of(launches[1], **local)


def test_every_setting_that_names_a_place_is_marked() -> None:
    words = ("_path", "_dir", "_file", "_jsonl")
    named = [setting for setting in all_settings() if setting.base is str and setting.name.endswith(words)]
    assert len(named) > 10
    assert [setting.name for setting in named if not setting.flag.path and setting.flag.status == "works"] == []
    others = {setting.name for setting in all_settings() if setting.flag.path} - {setting.name for setting in named}
    places = {"pipeline_trace", "save", "load", "tokenizer_model", "optimizer_offload_directory"}
    assert others == places, "whatever is marked is not compared"


def test_other_code_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(identity, "_PACKAGE", tmp_path)
    usual = of()["the code of megatron"]
    assert of()["the code of megatron"] == usual
    (tmp_path / "b.py").write_text("x = 2\n")
    changed = of()["the code of megatron"]
    (tmp_path / "b.py").write_text("")
    (tmp_path / "a.py").write_text("x = 1\nx = 2\n")
    assert len({usual, changed, of()["the code of megatron"]}) == 3


def test_another_tokenizer_shows() -> None:
    config = read_settings(flags(tokenizer_type="NullTokenizer"), needs_data=False)
    names = [
        started_with(config, MACHINES, build_tokenizer(replace(config.tokenizer, vocab_size=size)))["the tokenizer"]
        for size in (97, 97, 98)
    ]
    assert names[0] == names[1] != names[2] and names[0].startswith("NullTokenizer ")


class Ranks:
    """Ranks of a run as threads, with the result of each after it compared its data with the others."""

    def __init__(self, *data: Datasets, late: float = 0.0) -> None:
        self.became: list[Exception | None] = [None] * len(data)
        store, threads = dist.HashStore(), []
        for rank, datasets in enumerate(data):
            threads.append(Thread(target=self._meet, args=(store, rank, datasets)))
        for thread in threads[:-1]:
            thread.start()
        time.sleep(late)
        self.waited = all(thread.is_alive() for thread in threads[:-1])
        threads[-1].start()
        for thread in threads:
            thread.join(60)

    def _meet(self, store: dist.Store, rank: int, datasets: Datasets) -> None:
        try:
            info = LaunchInfo(rank=rank, world_size=len(self.became), agent_store=True)
            meet_over_data(datasets, store, info, told_every=0.1)
        except DataError as error:
            self.became[rank] = error


def data(content: str = "1" * 64, record: str = "", fingerprint: str = "f" * 64, folder: str = "/a") -> Datasets:
    source = SourceContent(f"{folder}/corpus", content, record)
    return Datasets(None, None, None, "", fingerprint=fingerprint, sources=[source])


def test_ranks_wait_at_the_store_for_one_that_builds_and_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(data(), data(folder="/b"), data(), late=0.5)
    assert ranks.became == [None, None, None] and ranks.waited
    line = capsys.readouterr().err.splitlines()[0]
    assert line.endswith("has waited for the others for 0 s: rank 2 has not opened the data (2 of 3 have)"), line


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            {"content": "2" * 64, "folder": "/b"},
            "source 1 is /[ab]/corpus .[12]{12}. on rank . and /[ab]/corpus .[12]{12}",
        ),
        ({"record": "3" * 64}, "the record of source 1 is (not there|3{12}) on rank . and (not there|3{12}) on rank ."),
        (
            {"fingerprint": "e" * 64},
            "the order and the weights of all sources is [ef]{12} on rank . and [ef]{12} on rank .",
        ),
    ],
    ids=["tokens", "record", "weights"],
)
def test_other_data_of_one_rank_ends_all_of_them_with_one_error(other: dict[str, str], told: str) -> None:
    ranks = Ranks(data(), data(**other), data())
    assert all(ranks.became), ranks.became
    (text,) = {str(error) for error in ranks.became}
    assert re.search(rf"rank \d \(.*\) reads other data than rank \d \(.*\): {told}.*; copy the files", text), text

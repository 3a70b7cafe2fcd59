"""Every setting has an effect where it declares one; elsewhere it gives a notice or is rejected."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from megatron.config import RunConfig
from megatron.config.flag import Setting
from megatron.config.run import all_settings, settings_by_name
from megatron.errors import ConfigError
from megatron.training import settings
from megatron.training.settings import read_settings
from tests.helpers.chats import some_chats, write_chat_tokenizer, write_chats
from tests.unit.config.commands import without
from tests.unit.tokenizer.support import write_small_bpe
from tests.unit.tokenizer.test_tik import write_json as write_tiktoken
from tests.unit.training.behaviour import observed, on_ranks, plan, train, write_json
from tests.unit.training.settings_table import BASE, CASES, ELSEWHERE, Case
from tests.unit.training.test_data_order import make_corpus
from tests.unit.training.test_data_settings import with_ends

ROOT = Path(__file__).parents[3]
WORKING = [setting for setting in all_settings() if setting.flag.status == "works"]

__all__ = ["observed"]


def command(*flags: str) -> list[str]:
    words = shlex.split(" ".join(flags))
    removed = [f"-{word}" for word in words if word.startswith("-") and not word.startswith("--")]
    base = without(BASE, *removed)
    return [*shlex.split(base), *(word for word in words if f"-{word}" not in removed)]


@pytest.fixture(scope="module")
def places(observed: Path) -> Path:
    """Data, tokenizers and checkpoints under the names that the cases use."""
    make_corpus(observed / "CORPUS")
    with_ends(observed / "ENDS")
    for number, data in {"": "CORPUS", "2": "ENDS"}.items():
        (observed / f"WORDS{number}").write_text(f"1 {data}\n")
        write_json(observed / f"SETS{number}.json", {"train": [data], "valid": [data]})
    (observed / "SEED.yaml").write_text("seed: 7\n")
    for name, words in {"HF": {"a": 0, "<|endoftext|>": 1}, "HF2": {"a": 0, "<|endoftext|>": 1, "b": 2}}.items():
        (observed / name).mkdir()
        write_json(
            observed / name / "tokenizer.json",
            {"version": "1.0", "model": {"type": "WordLevel", "vocab": words, "unk_token": "a"}},
        )
    for name in ("BPE", "BPE2", "TIK"):
        (observed / name).mkdir()
    write_small_bpe(observed / "BPE")
    vocab = json.loads((observed / "BPE" / "vocab.json").read_text())
    for token in ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<|endoftext|>", "<file>"):
        vocab.setdefault(token, len(vocab))
    write_json(observed / "BPE" / "vocab.json", vocab)
    write_json(observed / "BPE2" / "vocab.json", {**vocab, "one more": len(vocab)})
    merges = (observed / "BPE" / "merges.txt").read_text().splitlines(keepends=True)
    (observed / "BPE2" / "merges.txt").write_text("".join(merges[:-1]))
    write_tiktoken(observed / "TIK")
    write_chat_tokenizer(observed / "CHAT")
    write_chats(observed / "CHATS.jsonl", some_chats(9))
    for name in ("SAVED", "DAMAGED"):
        train(command(f"--save {name} --save-interval 1 --exit-interval 2"))
    (file,) = observed.glob("DAMAGED/iter_0000002/mp_rank_00/model_optim_rng.pt")
    file.write_bytes(file.read_bytes()[:-1])
    return observed


def test_every_setting_has_a_case() -> None:
    assert {setting.name for setting in WORKING} == CASES.keys() | ELSEWHERE.keys()
    assert not CASES.keys() & ELSEWHERE.keys()
    without_idle = [s.name for s in WORKING if s.flag.needs and s.name in CASES and CASES[s.name].idle is None]
    assert without_idle == [], "what it needs is to be left out once"
    for place in ELSEWHERE.values():
        assert ";" not in place or (ROOT / place.partition("; ")[2]).is_file(), place


SEEN: dict[str, object] = {}


@cache
def before(how: str, flags: str) -> tuple[str, ...]:
    return tuple(SEERS[how](command(flags)))


SEERS = {"train": train, "plan": plan, "on_ranks": on_ranks}


def effect(case: Case, flags: str) -> tuple[list[str], list[str]]:
    """Observations only without the setting, and only with it."""
    old, new = before(case.seen_by.__name__, flags), case.seen_by(command(flags, case.given))
    return [line for line in old if line not in new], [line for line in new if line not in old]


@pytest.mark.parametrize("name", CASES)
def test_a_setting_has_its_effect(places: Path, name: str) -> None:
    case, setting = CASES[name], settings_by_name()[name]
    assert not said_to_be_idle(setting, case.given, case.where), "there it is said to have none"
    assert any(effect(case, case.where)), f"{case.given} changes nothing"


def said_to_be_idle(setting: Setting, given: str, flags: str) -> bool:
    """Returns whether a notice or a rejection says that the setting has no effect."""
    try:
        lines = read_settings(command(flags, given)).notices
    except ConfigError as refusal:
        return any(line.startswith(setting.spelling) and "has no effect without" in line for line in refusal.lines)
    return any(line.startswith(setting.spelling) and "has no effect without" in line for line in lines)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.idle is not None])
def test_a_setting_without_effect_is_told_or_refused(places: Path, name: str) -> None:
    case, setting = CASES[name], settings_by_name()[name]
    assert case.idle is not None
    read_settings(command(case.idle))  # a command that is right
    try:
        config = read_settings(command(case.idle, case.given))
    except ConfigError as refusal:
        assert any(case.given.split()[0] in line for line in refusal.lines), refusal
        return
    told = [line for line in config.notices if line.startswith(setting.spelling) and "has no effect without" in line]
    assert len(told) == 1 and not setting.flag.insists
    idle = Case(case.given, case.where, case.idle)  # seen in a run on one rank
    assert effect(idle, case.idle) == ([], [])


PLANTED = "num_layers moe_z_loss_coeff clip_grad manual_gc save_optim tensorboard_queue_size profile_dir cpu_threads"


@pytest.mark.parametrize("name", PLANTED.split())
def test_a_setting_that_is_never_read_is_found(places: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: the value is parsed and checked, but the program uses the value of a run without the setting."""
    case, setting = CASES[name], settings_by_name()[name]
    assert any(effect(case, case.where))
    without_it = read_settings(command(case.where)).value(setting)

    def forgetful(words: list[str], **options: bool) -> RunConfig:
        config = read_settings(words, **options)
        section = replace(getattr(config, setting.section), **{name: without_it})
        return replace(config, **{setting.section: section})

    monkeypatch.setattr(settings, "read_settings", forgetful)
    assert not any(effect(case, case.where))

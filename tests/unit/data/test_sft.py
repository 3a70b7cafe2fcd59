"""Files of conversations: valid lines, packing, splitting, caching, and the masks of a batch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config import DataConfig
from megatron.data.datasets import Datasets
from megatron.data.loader import BatchDataset
from megatron.data.masks import MaskConfig
from megatron.data.sft.packing import pack
from megatron.data.split_datasets import build_train_valid_test
from megatron.errors import ConfigError, DataError, MegatronError
from tests.helpers.chats import chat, write_chats

PAD = 7


class CannotSay(Exception):
    pass


class Letters:
    """Encodes a character as an id; all characters of an answer count."""

    def __init__(self) -> None:
        self.encoded = 0
        self.fingerprint = "letters"

    def encode_all(self, conversations: Iterable[Any]) -> Iterator[list[tuple[np.ndarray, np.ndarray]] | CannotSay]:
        for messages, _ in list(conversations):  # all are read before the first is encoded
            try:
                yield self.encode(messages)
            except CannotSay as error:
                yield error

    def encode(self, messages: Sequence[Any]) -> list[tuple[np.ndarray, np.ndarray]]:
        self.encoded += 1
        if any("?" in (message["content"] or "") for message in messages):  # the first answer, and then the second
            return [*self.encode(chat("a", "b")), *self.encode(chat("acd", "e"))]
        if any("!" in (message["content"] or "") for message in messages):
            raise CannotSay("it shouts")
        ids = [ord(letter) for message in messages for letter in message["content"]]
        answers = [message["role"] == "assistant" for message in messages for _ in message["content"]]
        return [(np.array(ids, dtype=np.int32), np.array([*answers[1:], False]))]


def build(path: Path, chat: Any = None, samples: Any = (None, 0, 0), **changes: Any) -> Datasets:
    config = DataConfig(**{"data_path": (str(path),), "seq_length": 12, "split": "100,0,0", "sft": True, **changes})
    return build_train_valid_test(
        config, num_samples=samples, seed=5, vocab_size=200, eod_id=PAD, chat=chat or Letters()
    )


def shown(sample: np.ndarray) -> str:
    """Marks the start of a conversation with |, and puts tokens whose successor is predicted in capitals."""
    text = ""
    for token in sample.tolist():
        letter = "_" if token & 0xFF == PAD else chr(token & 0xFF)
        text += "|" * bool(token >> 33 & 1) + (letter.upper() if token >> 32 & 1 else letter)
    return text


def test_samples_are_whole_conversations_with_marks(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "c.jsonl", [chat("ab", "cd"), chat("e", "f", "g", "h"), chat("ijkl", "mnop")])
    built = build(path)
    assert built.train is not None and len(built.train) == 2
    texts = sorted(shown(built.train[i]).rstrip("_|") for i in range(2))
    assert sorted("".join(texts).split("|")[1:]) == ["EfGh", "aBCd", "ijkLMNOp"]
    assert all(len(built.train[i]) == 13 for i in range(2))
    assert "3 conversations in 2 samples, 61.5% full" in "\n".join(built.notes)
    assert built.train.locate(0, 0).__str__().startswith(f"{path}, line ")


def test_a_batch_has_the_masks_of_its_conversations(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "c.jsonl", [chat("ab", "cd"), chat("e", "f", "g", "h")])
    dataset = build(path).train
    assert dataset is not None
    (batch,) = [BatchDataset(dataset, MaskConfig(conversations=True), 200).batch([0])]
    first = "abcd" if chr(int(batch["tokens"][0, 0])) == "a" else "efgh"
    order = ["abcd", "efgh"] if first == "abcd" else ["efgh", "abcd"]
    assert "".join(map(chr, batch["tokens"][0, :8].tolist())) == "".join(order)
    assert batch["tokens"][0, 8:].tolist() == [PAD] * 4
    assert batch["labels"][0, :-1].tolist() == batch["tokens"][0, 1:].tolist()
    counted = {"abcd": [0, 1, 1, 0], "efgh": [1, 0, 1, 0]}
    assert batch["loss_mask"][0].tolist() == [*counted[order[0]], *counted[order[1]], 0, 0, 0, 0]
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 3] * 3
    documents = batch["document_ids"]
    assert documents.numbers()[0].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert (documents.longest, documents.divide_rows) == (4, True)


def test_the_order_is_a_function_of_the_seed_and_a_longer_run_begins_alike(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "c.jsonl", [chat("a" * (1 + i % 6), "b" * (1 + i % 5)) for i in range(40)])
    short, long = (build(path, samples=(n, 0, 0)).train for n in (30, 70))
    assert short is not None and long is not None
    for i in range(30):
        assert np.array_equal(short[i], long[i])
    one_epoch = build(path).train
    assert one_epoch is not None and len(one_epoch) < 30
    lines = [str(one_epoch.locate(i, 0)) for i in range(len(one_epoch))]
    assert len(set(lines)) == len(lines)


def test_conversations_are_encoded_once(tmp_path: Path) -> None:
    path, letters = write_chats(tmp_path / "c.jsonl", [chat("a", "b")] * 3), Letters()
    first = build(path, letters)
    assert letters.encoded == 3
    again = build(path, letters)
    assert letters.encoded == 3 and again.fingerprint == first.fingerprint and again.train is not None
    letters.fingerprint = "another template"
    assert build(path, letters).fingerprint != first.fingerprint and letters.encoded == 6
    write_chats(path, [chat("a", "c")] * 3)
    assert build(path, letters).fingerprint != first.fingerprint and letters.encoded == 9


def test_splits_and_blends(tmp_path: Path) -> None:
    one, two = (write_chats(tmp_path / f"{n}.jsonl", [chat("abcde", n * 6)] * 10) for n in "xy")
    parts = build(one, split="50,50,0", samples=(10, 5, 0))
    assert parts.train is not None and parts.valid is not None and len(parts.valid) == 5
    mixed = build(one, data_path=("0.8", str(one), "0.2", str(two)), samples=(10, 0, 0))
    assert mixed.train is not None and len(mixed.train) >= 10
    letters = [shown(mixed.train[i])[6].lower() for i in range(10)]
    assert (letters.count("x"), letters.count("y")) == (8, 2)


def test_what_is_too_long_or_not_answered_is_counted(tmp_path: Path) -> None:
    talks = [chat("ab", "c" * 40), chat("a" * 20, "b"), chat("only asked"), chat("a", "b"), chat("x", "y", "z")]
    built = build(write_chats(tmp_path / "c.jsonl", talks))
    notes = "\n".join(built.notes)
    assert (
        "2 conversations are longer than --seq-length 12: 1 truncated, 1 left out (no answer within that length)"
        in notes
    )
    assert "left out: 1 conversation has no answer of the assistant to learn from (line 3)" in notes
    assert built.train is not None
    assert any(shown(built.train[i]) == "|aBCCCCCCCCCCC" for i in range(len(built.train)))
    with pytest.raises(DataError, match=r"--seq-length 12: none of 1 conversations of .* has an answer"):
        build(write_chats(tmp_path / "long.jsonl", [chat("a" * 20, "b")]))
    with pytest.raises(DataError, match="no conversation has an answer of the assistant"):
        build(write_chats(tmp_path / "asked.jsonl", [chat("a")]))


def test_answers_that_a_template_shows_in_another_way_later_are_conversations_of_their_own(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "c.jsonl", [chat("x", "y"), chat("a?", "b", "c", "d")])
    for _ in range(2):  # the second from the cache
        built = build(path)
        assert built.train is not None and len(built.train) == 1
        assert sorted(shown(built.train[0]).rstrip("_|").split("|")[1:]) == ["Ab", "Xy", "acDe"]
        lines = sorted(str(built.train.locate(0, token)).split(", ")[1] for token in (0, 4, 6))
        assert lines == ["line 1", "line 2", "line 2"]
        assert "1 sample was added, which ends at an earlier answer" in "\n".join(built.notes)


def test_a_system_message_begins_a_conversation(tmp_path: Path) -> None:
    """Users of Megatron-LM pack conversations by hand, separated by system messages."""
    letters = Letters()
    build(write_chats(tmp_path / "c.jsonl", [[*chat("a", "b", system="s"), *chat("c", "d", system="")]]), letters)
    assert letters.encoded == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', "line 2: not JSON"),
        ("\xff", "line 2: not JSON"),
        ("[" * 10**5, "line 2: not JSON"),
        ('{"text": "a"}', "line 2: no messages; a line must be"),
        ('{"messages": []}', "line 2: no messages"),
        ('["a"]', "line 2: no messages"),
        ('{"messages": ["a"]}', "line 2: message 1 has no role"),
        ('{"messages": [{"role": "human", "content": "a"}]}', "line 2: message 1 has the role 'human'; use one of"),
        ('{"messages": [{"role": ["user"], "content": "a"}]}', "line 2: message 1 has the role"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "line 2: message 1: content is a list; give text"),
        ('{"messages": [{"role": "user", "content": ""}]}', "line 2: message 1 of the user is empty"),
        ('{"messages": [{"role": "assistant"}]}', "line 2: message 1 of the assistant is empty"),
        ('{"messages": [{"role": "user", "content": "a!"}]}', "line 2: it shouts"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": 1}', "line 2: tools is not a list"),
    ],
)
def test_a_wrong_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = write_chats(tmp_path / "c.jsonl", [chat("a", "b")])
    path.write_bytes(path.read_bytes() + line.encode("latin-1") + b"\n")
    with pytest.raises(DataError) as error:
        build(path)
    assert str(error.value).startswith(f"{path}, {message}") and "\n" not in str(error.value)


def test_all_wrong_lines_are_counted(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "c.jsonl", [chat("a", "b"), chat("a!", "b"), [], chat("!", "b")])
    with pytest.raises(DataError, match=r"c\.jsonl, line 2: it shouts \(2 others have errors too\)$"):
        build(path)


def test_what_the_settings_need(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "c.jsonl", [chat("a", "b")])
    config = DataConfig(data_path=(str(path),), seq_length=12, sft=True)
    with pytest.raises(ConfigError, match=r"--sft: .* pass chat=run\.chat"):
        build_train_valid_test(config, num_samples=(1, 0, 0), seed=1, vocab_size=None, eod_id=None)
    with pytest.raises(MegatronError, match=r"none\.jsonl: no such file; give a JSONL"):
        build(tmp_path / "none.jsonl")


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60), seed=st.integers(0, 9))
def test_packs_hold_all_and_not_too_much(lengths: list[int], seed: int) -> None:
    sizes = np.array(lengths)
    packs = pack(sizes, 20, np.random.RandomState(seed))
    assert sorted(packs.members.tolist()) == list(range(len(lengths)))
    filled = [int(sizes[packs.members[a:b]].sum()) for a, b in zip(packs.starts[:-1], packs.starts[1:])]
    assert min(filled) > 0 and max(filled) <= 20
    assert len(packs) <= 11 / 9 * -(-sum(lengths) // 20) + 4, "first fit, and best fit, the longest first"


def test_a_file_of_one_line_without_an_end(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text("\ufeff" + json.dumps({"messages": chat("a", "b"), "id": 3}))
    assert build(path).train is not None

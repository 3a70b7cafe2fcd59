"""Files with one JSON array give the items that the standard library finds."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.errors import DataError
from megatron.preprocess.input import arrays
from megatron.preprocess.input.arrays import EMPTY_ITEM, ArrayError, array_lines
from megatron.preprocess.input.documents import TOO_LONG
from megatron.preprocess.input.files import expand_inputs
from megatron.preprocess.input.segments import plan_segments, read_batches


def split(chunks: Any, limit: int) -> list[bytes]:
    """Splits at \n only; splitlines would also cut at \r."""
    return b"".join(array_lines(chunks, limit)).split(b"\n")[:-1]


nasty_text = st.text(alphabet='ab\\"{}[],: \n\r\t\u00e9\u4e2d\U0001f600', max_size=12)
values = st.recursive(
    nasty_text | st.integers() | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(nasty_text, inner, max_size=3),
    max_leaves=8,
)


def check(items: list[Any], indent: int | None, ascii_only: bool, chunk: int) -> None:
    content = json.dumps(items, indent=indent, ensure_ascii=ascii_only).encode()
    chunks = (content[i : i + chunk] for i in range(0, len(content), chunk))
    assert [json.loads(line) for line in split(chunks, 10**6)] == items


@settings(max_examples=400, deadline=None)
@given(st.lists(values, max_size=6), st.sampled_from([None, 0, 2]), st.booleans(), st.integers(1, 50))
def test_items_are_those_of_the_standard_library(
    items: list[Any], indent: int | None, ascii_only: bool, chunk: int
) -> None:
    check(items, indent, ascii_only, chunk)


def test_a_wrong_scanner_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_BACKSLASH", ord("/"))  # as if no quote were ever escaped
    with pytest.raises((AssertionError, ArrayError, ValueError)):
        check([{"a": 'x","y'}, {"b": '\\"}'}], None, True, 3)


@pytest.mark.parametrize("chunk", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    "content, items",
    [
        (b"[]", []),
        (b" \n[ ] \n", []),
        (b"[1]", [b"1"]),
        (b'[ {"a": 1} ,\n{"b"\n:2}]\n', [b'{"a": 1}', b'{"b"\r:2}']),
        (b"[,]", [EMPTY_ITEM, EMPTY_ITEM]),
        (b'[{"a": 1},]', [b'{"a": 1}', EMPTY_ITEM]),
        (b'[{"a" 1}, nonsense, {"b": [1, {}]}]', [b'{"a" 1}', b"nonsense", b'{"b": [1, {}]}']),
        (b'["a\nb"]', [b'"a\rb"']),  # not JSON before and after
        (b'["\\\\", "\\"", "\\\\\\"", "]"]', [b'"\\\\"', b'"\\""', b'"\\\\\\""', b'"]"']),
    ],
)
def test_items_as_lines(content: bytes, items: list[bytes], chunk: int) -> None:
    chunks = (content[i : i + chunk] for i in range(0, len(content), chunk))
    assert split(chunks, 10**6) == items


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_an_item_over_the_limit_is_not_kept(chunk: int) -> None:
    content = b'[{"a": 1}, {"a": "' + b"x" * 100 + b'"}, {"b": 2}]'
    chunks = (content[i : i + chunk] for i in range(0, len(content), chunk))
    assert split(chunks, 50) == [b'{"a": 1}', TOO_LONG, b'{"b": 2}']


@pytest.mark.parametrize(
    "content, item, reason",
    [
        (b"[", 1, "ends inside"),
        (b'[{"a": 1}, {"b', 2, "ends inside"),
        (b'[{"a": "1}]', 1, "ends inside"),
        (b"[{}, {}] x", 2, "continues after the end"),
        (b"[{},\n{}]\n[{}]", 2, "continues after the end"),
        (b"[{]}, {}]", 1, "continues after the end"),
    ],
)
def test_a_broken_array_is_refused_with_the_item(content: bytes, item: int, reason: str, tmp_path: Path) -> None:
    for chunk in (1, 3, 1000):
        with pytest.raises(ArrayError, match=reason) as error:
            split((content[i : i + chunk] for i in range(0, len(content), chunk)), 10**6)
        assert error.value.item == item
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(
        DataError, match=rf"a\.json, item {item}: the file .*; give one array of objects, or one object"
    ):
        list(plan_segments(expand_inputs([str(path)])))


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_an_array_file_gives_its_documents_and_names_items(pack: Any, tmp_path: Path) -> None:
    chance = random.Random(4)
    records: list[Any] = [{"text": "x\n" * chance.randrange(50), "n": [i, {"t": "]"}]} for i in range(100)]
    records[40] = {"txt": ""}
    path = tmp_path / "a.json"
    path.write_bytes(pack(b"\xef\xbb\xbf\n" + json.dumps(records, indent=1).encode()))
    sources = expand_inputs([str(path)])
    found, bad, before = [], [], 0
    for segment in plan_segments(sources, segment_bytes=700):
        lines = 0
        for batch in read_batches(segment, ["text"]):
            found += [texts[0][0] for _, texts in batch.documents]
            bad += [segment.source.place(before + one.number + 1) + f": {one}" for one in batch.bad]
            lines += batch.lines
        before += lines
    assert found == [record["text"] for record in records if "text" in record]
    assert bad == [f"{path}, item 41: key missing (no 'text' among the keys: 'txt')"]

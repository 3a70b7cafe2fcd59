"""Parquet files give the texts that pyarrow wrote."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import DataError
from megatron.preprocess.input import tables
from megatron.preprocess.input.files import expand_inputs
from megatron.preprocess.input.segments import count_lines, plan_segments, read_batches

pyarrow = pytest.importorskip("pyarrow", reason="pip install pyarrow")
parquet = pytest.importorskip("pyarrow.parquet", reason="pip install pyarrow")


def write(path: Path, columns: dict[str, Any], row_group_size: int = 1000, **options: Any) -> str:
    parquet.write_table(pyarrow.table(columns), path, row_group_size=row_group_size, **options)
    return str(path)


def read(path: str, keys: list[str], segment_bytes: int = 1) -> tuple[list[Any], list[str]]:
    """Texts, and bad rows by their place in the file."""
    found, bad, before = [], [], 0
    for segment in plan_segments(expand_inputs([path]), segment_bytes=segment_bytes):
        assert count_lines(segment.source, 0, segment.start) == before
        rows = 0
        for batch in read_batches(segment, keys):
            assert batch.first_line == rows and batch.lines == len(batch.documents) + len(batch.bad)
            found += [texts for _, texts in batch.documents]
            bad += [f"{before + one.number + 1}: {one}" for one in batch.bad]
            rows += batch.lines
        before += rows
    return found, bad


TEXTS = [f"text {i} é 中 😀 \n" * (i % 5) for i in range(1000)]


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.string(),
        pyarrow.large_string(),
        pyarrow.string_view(),
        pyarrow.binary(),
        pyarrow.large_binary(),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    ],
    ids=str,
)
def test_texts_of_every_kind_of_column(kind: Any, tmp_path: Path) -> None:
    binary = pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)
    given = [text.encode() for text in TEXTS] if binary else TEXTS
    column = pyarrow.array(given, pyarrow.string()).dictionary_encode() if "dictionary" in str(kind) else None
    column = pyarrow.array(given, kind) if column is None else column
    path = write(tmp_path / "a.parquet", {"other": list(range(1000)), "text": column}, row_group_size=77)
    for segment_bytes in (1, 5000, 10**9):
        assert read(path, ["text"], segment_bytes) == ([[[text]] for text in TEXTS], [])


def test_row_groups_are_segments_and_positions_end_at_the_size(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"text": TEXTS}, row_group_size=300)
    [source] = expand_inputs([path])
    planned = list(plan_segments([source], segment_bytes=1))
    assert [(segment.start, segment.stop) for segment in planned] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert planned[-1].position == source.size
    assert [(s.start, s.stop) for s in plan_segments([source], segment_bytes=10**9)] == [(0, 4)]
    assert read(write(tmp_path / "b.parquet", {"text": TEXTS[:0]}), ["text"]) == ([], [])


def test_paths_lists_and_several_keys(tmp_path: Path) -> None:
    meta = [{"text": "a", "deep": {"er": ["x", "y"]}}, {"text": "b", "deep": None}, None]
    path = write(tmp_path / "a.parquet", {"meta": meta, "meta.flat": ["1", "2", "3"], "list": [["p", "q"], [], ["r"]]})
    assert read(path, ["meta.flat", "list"])[0] == [[["1"], ["p", "q"]], [["2"], []], [["3"], ["r"]]]
    assert read(path, ["meta.text"]) == ([[["a"]], [["b"]]], ["3: not text ('meta.text' holds null)"])
    found, bad = read(path, ["meta.deep.er"])
    assert found == [[["x", "y"]]] and len(bad) == 2


def test_a_column_of_this_very_name_wins_over_a_path(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"meta": [{"text": "nested"}], "meta.text": ["flat"]})
    assert read(path, ["meta.text"]) == ([[["flat"]]], [])


def test_bad_rows_have_their_reason(tmp_path: Path) -> None:
    invalid = pyarrow.array([b"good", b"\xff", None, "é".encode()], pyarrow.binary())
    as_text = pyarrow.Array.from_buffers(pyarrow.string(), 4, invalid.buffers())
    expected = (
        [[["good"]], [["é"]]],
        ["2: not UTF-8 (byte 1 of 'text': invalid start byte)", "3: not text ('text' holds null)"],
    )
    assert read(write(tmp_path / "a.parquet", {"text": invalid}), ["text"]) == expected
    assert read(write(tmp_path / "b.parquet", {"text": as_text}), ["text"]) == expected
    lists = write(tmp_path / "c.parquet", {"text": [["a", None], ["b"]]})
    assert read(lists, ["text"]) == ([[["b"]]], ["1: not text ('text' holds null)"])


def test_a_missing_or_unfit_column_is_named_with_those_present(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_BATCH_ROWS", 1)
    path = write(tmp_path / "a.parquet", {"content": ["a", "b"], "meta": [{"id": 1}] * 2})
    for key, reason in (
        ("text", "key missing (no 'text' among the columns: 'content', 'meta')"),
        ("meta.text", "key missing (no 'meta.text' among the columns of 'meta': 'id')"),
        ("meta.id", "not text ('meta.id' is a column of type int64)"),
    ):
        for keys in ([key], ["content", key]):
            assert read(path, keys) == ([], [f"1: {reason}", f"2: {reason}"])


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    whole = Path(write(tmp_path / "a.parquet", {"text": TEXTS}, compression="gzip")).read_bytes()
    path = tmp_path / "b.parquet"
    for content in (whole[:-100], whole[:100], b"", whole[:50] + bytes(200) + whole[250:]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"b\.parquet: damaged parquet file \(.+\); fetch it again"):
            read(str(path), ["text"])


def test_a_huge_row_group_is_read_in_pieces(tmp_path: Path) -> None:
    texts = ["x" * 1000 + str(i) for i in range(40_000)]
    path = write(tmp_path / "a.parquet", {"text": texts}, 10**6, compression="none", use_dictionary=False)
    before = pyarrow.total_allocated_bytes()
    [segment] = plan_segments(expand_inputs([path]))
    tracemalloc.start()
    try:
        rows = 0
        for batch in read_batches(segment, ["text"]):
            rows += batch.lines
            assert pyarrow.total_allocated_bytes() - before < 15 << 20
        assert rows == 40_000 and tracemalloc.get_traced_memory()[1] < 15 << 20
    finally:
        tracemalloc.stop()

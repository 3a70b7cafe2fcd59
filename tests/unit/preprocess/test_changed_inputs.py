"""Input that changes during reading: either all data is of the planned file, or the run ends."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.errors import DataError
from megatron.preprocess.input.files import InputFile, expand_inputs
from megatron.preprocess.input.locate import Assigned, Lines
from megatron.preprocess.input.segments import plan_segments, read_batches


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def source_of(path: Path) -> InputFile:
    [source] = expand_inputs([str(path)])
    return source


def changed_in_place(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))


def replaced(path: Path) -> None:
    other = write(path.with_name("other"), path.read_bytes())
    os.utime(other, ns=(1, 1))
    other.replace(path)


def grown(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"{}\n")


@pytest.mark.parametrize("change", [changed_in_place, replaced, grown])
@pytest.mark.parametrize("kind", ["lines", "gzip", "array", "parquet"])
def test_a_file_that_changes_between_plan_and_reading_is_said(
    kind: str, change: Callable[[Path], None], tmp_path: Path
) -> None:
    content = {"lines": b"{}\n" * 10, "gzip": gzip.compress(b"{}\n" * 10), "array": b"[{}, {}]"}
    path = write(tmp_path / "a", content.get(kind, b""))
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="pip install pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"text": ["1"]}), path)
    source = source_of(path)
    assert source.kind == kind
    list(plan_segments([source]))
    change(path)
    with pytest.raises(DataError, match=r"a: changed while it was read"):
        for segment in plan_segments([source]):
            list(read_batches(segment, ["text"]))


def test_a_file_that_is_written_while_a_worker_reads_it_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "a", b'{"text": ""}\n' * 20000)
    [segment] = plan_segments([source_of(path)])
    batches = read_batches(segment, ["text"])
    next(batches)
    with open(path, "r+b") as file:
        file.write(b"!")
    with pytest.raises(DataError, match=r"a: changed while it was read"):
        list(batches)


def test_a_lost_segment_of_a_file_that_has_gone_is_named_by_its_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "a", b"{}\n" * 10)
    source = source_of(path)
    second = list(plan_segments([source], segment_bytes=9))[1]
    lines = Lines()
    lines.enter(source, 0)
    assert lines.place_range(Assigned(second, None, 1), []) == f"{path}, lines 5 to 6"
    path.unlink()
    assert lines.place_range(Assigned(second, None, 1), []) == f"{path}, bytes 9 to 18"

"""Everything that --input accepts."""

from __future__ import annotations

import gzip
import io
import os
import sys
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.preprocess.input import files as sources
from megatron.preprocess.input.files import InputFile, expand_inputs, input_bytes


def write(path: Path, content: bytes = b"{}\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def names(patterns: list[str], root: Path) -> list[str]:
    return [Path(source.path).relative_to(root).as_posix() for source in expand_inputs(patterns)]


def test_order_is_that_given_and_patterns_are_sorted(tmp_path: Path) -> None:
    for name in ("b2.jsonl", "b1.jsonl", "a.jsonl", "deep/x.txt", "deep/er/w.txt"):
        write(tmp_path / name)
    given = [str(tmp_path / "b*.jsonl"), str(tmp_path / "a.jsonl"), str(tmp_path / "**/*.txt")]
    assert names(given, tmp_path) == ["b1.jsonl", "b2.jsonl", "a.jsonl", "deep/er/w.txt", "deep/x.txt"]


def test_a_folder_gives_its_files_with_known_endings(tmp_path: Path) -> None:
    for name in ("z.jsonl", "b/y.json", "b/a/x.jsonl.gz", "README.md", ".hidden.jsonl", ".git/w.json", "out.bin"):
        write(tmp_path / name)
    write(tmp_path / "out_text_document.meta.json")
    assert names([str(tmp_path)], tmp_path) == ["b/a/x.jsonl.gz", "b/y.json", "out_text_document.meta.json", "z.jsonl"]
    write(tmp_path / "out_text_document.idx")  # now it is the record of a dataset
    assert names([str(tmp_path)], tmp_path) == ["b/a/x.jsonl.gz", "b/y.json", "z.jsonl"]


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    write(tmp_path / "data/a.jsonl")
    (tmp_path / "data/loop").symlink_to(tmp_path / "data")
    write(tmp_path / "elsewhere/b.jsonl")
    (tmp_path / "data/link").symlink_to(tmp_path / "elsewhere")
    assert names([str(tmp_path / "data")], tmp_path) == ["data/a.jsonl", "data/link/b.jsonl"]


def test_kinds_are_seen_by_name_or_by_content(tmp_path: Path) -> None:
    pytest.importorskip("zstandard", reason="pip install zstandard")
    import zstandard

    cases = [
        ("a.jsonl", b'{"text": ""}', "lines", False),
        ("a.json", b'\xef\xbb\xbf \n [{"text": ""}]', "array", True),
        ("a.gz", gzip.compress(b"{}"), "gzip", False),
        ("b.gz", gzip.compress(b"\n[{}]"), "gzip", True),
        ("c.json", gzip.compress(b"{}"), "gzip", False),  # packed, and not named so
        ("a.zst", zstandard.compress(b"{}"), "zstd", False),
        ("b.jsonl.zst", zstandard.compress(b"[{}]"), "zstd", True),
        ("c.txt", zstandard.compress(b"[{}]"), "zstd", True),
        ("damaged.gz", b"no gzip", "gzip", False),
        ("damaged.zst", b"no zstd", "zstd", False),
        ("empty.jsonl", b"", "lines", False),
        ("blank.jsonl", b" \n" * 200000 + b"[{", "array", True),
        ("blank.gz", gzip.compress(b" \n" * 200000 + b"[{"), "gzip", True),
        ("blank.zst", zstandard.compress(b" \n" * 200000 + b"[{"), "zstd", True),
        ("nothing.jsonl", b" \n" * 20000, "lines", False),
        ("first.jsonl", b'[1, "]"]\n{"text": ""}\n', "lines", False),  # a bad line, and not one array
        ("first.gz", gzip.compress(b'\n[]\n\n{"text": ""}\n'), "gzip", False),
        ("one.json", b'[{"text": ""}]\n\n', "array", True),
        ("long.json", b'[{"text": "' + b"x" * 20000 + b'"}]\n', "array", True),
        ("comma.json", b'[{"text": ""},\n{"text": ""}]\n', "array", True),
    ]
    for name, content, kind, array in cases:
        [source] = expand_inputs([str(write(tmp_path / name, content))])
        assert (source.kind, source.array, source.size) == (kind, array, len(content)), name


def test_identity_changes_with_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    [before], [same] = expand_inputs([str(path)]), expand_inputs([os.path.relpath(path)])
    assert before.identity == same.identity and str(path) in before.identity
    os.utime(path, ns=(1, 1))
    [touched] = expand_inputs([str(path)])
    write(path, b"{}\n\n")
    os.utime(path, ns=(1, 1))
    [longer] = expand_inputs([str(path)])
    assert len({before.identity, touched.identity, longer.identity}) == 3


def test_places_are_named_by_what_a_document_is() -> None:
    assert InputFile("a", "lines", 0, "").place(3) == "a:3"
    assert InputFile("a", "gzip", 0, "", array=True).place(3) == "a, item 3"
    assert InputFile("a", "parquet", 0, "").place(3) == "a, row 3"


def refused(*given: object) -> str:
    with pytest.raises(ConfigError) as error:
        expand_inputs([str(name) for name in given])
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_cannot_be_read_is_refused_with_the_way_out(tmp_path: Path) -> None:
    write(tmp_path / "nothing/README.md")
    (tmp_path / "broken.jsonl").symlink_to(tmp_path / "gone")
    assert "there is no such file; check the path" in refused(tmp_path / "missing.jsonl")
    assert "no file matches the pattern" in refused(tmp_path / "*.jsonl.zst")
    assert "no such file (a broken link?)" in refused(tmp_path / "broken.jsonl")
    assert "holds no .jsonl, .json, .ndjson, .gz, .zst, .parquet files" in refused(tmp_path / "nothing")
    assert "unpack it first (bunzip2)" in refused(write(tmp_path / "a.jsonl.bz2"))
    assert "unpack it first (tar xf)" in refused(write(tmp_path / "a.tar.gz"))
    assert "unpack it first (unxz)" in refused(write(tmp_path / "packed/a.JSON.XZ").parent)
    assert "neither a file nor a pipe" in refused("/dev/zero")
    assert "there is no such file" in refused(write(tmp_path / "file.jsonl") / "below")


def test_a_file_given_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    (tmp_path / "link.jsonl").symlink_to(path)
    assert "given twice" in refused(path, path)
    assert "given twice" in refused(tmp_path)
    assert "given twice" in refused(path, tmp_path / "l*.jsonl")


def test_permissions_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates the refusal: tests may run as root, whom no permission stops."""

    def deny(file: object, path: str, size: int) -> None:
        raise PermissionError(13, "Permission denied", path)

    path = write(tmp_path / "a.jsonl")
    monkeypatch.setattr(sources, "look_into", deny)
    assert refused(path) == f"--input {path}: permission denied; check its permissions"


def test_a_folder_that_may_not_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(top: str, onerror: object, followlinks: bool) -> list[object]:
        assert callable(onerror)
        onerror(PermissionError(13, "Permission denied", top))
        return []

    monkeypatch.setattr(os, "walk", deny)
    assert "cannot be read (Permission denied)" in refused(tmp_path)


class FakeStdin(io.TextIOWrapper):
    terminal = False

    def isatty(self) -> bool:
        return self.terminal


def test_standard_input_stands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = FakeStdin(io.BytesIO(b"{}"))
    monkeypatch.setattr(sys, "stdin", stdin)
    [source] = expand_inputs(["-"])
    assert (source.path, source.kind, source.size) == ("standard input", "stdin", 0)
    assert input_bytes([source]) == 0
    assert "give only -" in refused("-", "-")
    assert "give only -" in refused(write(tmp_path / "a.jsonl"), "-")
    stdin.terminal = True
    assert "is a terminal" in refused("-")
    monkeypatch.setattr(sys, "stdin", None)
    assert "is closed" in refused("-")


def test_a_named_pipe_is_a_stream_of_unknown_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    [source] = expand_inputs([str(tmp_path / "pipe")])  # has no writer: it must not be opened here
    assert (source.kind, source.size) == ("stdin", 0)
    assert input_bytes([source, InputFile("a", "lines", 7, "")]) == 0
    assert input_bytes([InputFile("b", "gzip", 3, ""), InputFile("a", "lines", 7, "")]) == 10


def test_a_file_that_hides_its_size_is_a_stream() -> None:
    path = Path("/proc/self/status")
    if not path.exists():
        pytest.skip("no /proc here: no file of which the system says that it has no bytes")
    assert [source.kind for source in expand_inputs([str(path)])] == ["stdin"]


def test_endings_in_capitals(tmp_path: Path) -> None:
    write(tmp_path / "A.JSONL.GZ", gzip.compress(b"{}"))
    write(tmp_path / "B.NDJSON")
    assert [source.kind for source in expand_inputs([str(tmp_path)])] == ["gzip", "lines"]


@pytest.mark.parametrize("ending, package", [(".zst", "zstandard"), (".parquet", "pyarrow")])
def test_a_missing_package_is_named(ending: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert f"needs the package {package}; pip install {package}" in refused(write(tmp_path / f"a{ending}"))


def test_patterns_that_match_folders_and_what_lies_in_them(tmp_path: Path) -> None:
    for name in ("data/a.jsonl", "data/deep/b.jsonl", "data/deep/er/c.jsonl", "data/deep/notes.md"):
        write(tmp_path / name)
    below = ["data/a.jsonl", "data/deep/b.jsonl", "data/deep/er/c.jsonl"]
    assert names([f"{tmp_path}/data/**"], tmp_path) == names([f"{tmp_path}/data/**/"], tmp_path) == below
    assert names([f"{tmp_path}/*/**"], tmp_path) == below
    assert names([f"{tmp_path}/**/*.jsonl"], tmp_path) == below
    assert names([f"{tmp_path}/data/**/*"], tmp_path) == [*below, "data/deep/notes.md"]
    (tmp_path / "empty/folder").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"--input .*empty/\*\*/\*: no file matches the pattern"):
        expand_inputs([f"{tmp_path}/empty/**/*"])


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.zst"])
def test_a_packed_file_of_no_bytes_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"--input .*{name}: has 0 bytes, .*; fetch it again, or remove it"):
        expand_inputs([str(write(tmp_path / name, b""))])

"""The corpus of the quickstart: real code, one object per line, the same every time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def make(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "make_stdlib_corpus.py"), "--output", str(output), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_one_json_object_a_line_and_the_same_twice(tmp_path: Path) -> None:
    for name in ("a", "b"):
        done = make(tmp_path / name / "corpus.json", "--max-megabytes", "0.5")
        assert done.returncode == 0, done.stderr
    first, second = ((tmp_path / name / "corpus.json").read_text() for name in ("a", "b"))
    rows = [json.loads(line) for line in first.splitlines()]
    assert first == second
    assert all(set(row) == {"path", "content"} and row["content"].strip() for row in rows)
    assert any("import " in row["content"] for row in rows)
    assert not any("test" in Path(row["path"]).parts for row in rows)
    assert 0.5e6 <= sum(len(row["content"]) for row in rows) < 1.5e6


def test_another_seed_is_another_order(tmp_path: Path) -> None:
    orders = []
    for seed in ("1", "2"):
        assert make(tmp_path / seed, "--max-megabytes", "0.2", "--seed", seed).returncode == 0
        orders.append([json.loads(line)["path"] for line in (tmp_path / seed).read_text().splitlines()])
    assert orders[0] != orders[1]


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for output, code, reason in ((tmp_path, 2, "is a directory"), (tmp_path / "file" / "c", 13, "cannot be written")):
        done = make(output, "--max-megabytes", "0.1")
        assert done.returncode == code and len(done.stderr.strip().splitlines()) == 1
        assert f"--output {output}" in done.stderr and reason in done.stderr
    done = make(tmp_path / "c", "--max-megabyte", "1")
    assert done.returncode == 2 and "did you mean --max-megabytes?" in done.stderr

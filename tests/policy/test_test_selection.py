"""Selection of tests by `bash tests/run.sh --changed` and `--quick`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.changed import ROOT, affected

FILES = {
    "megatron/a/__init__.py": "",
    "megatron/a/b.py": "def f(): from megatron.a import c",
    "megatron/a/c.py": "",
    "megatron/cli/x.py": "",
    "tools/x.py": "from megatron.cli import x",
    "pretrain.py": "import megatron.a.c",
    "tests/unit/test_b.py": "from megatron.a.b import f",
    "tests/unit/test_patched.py": 'patch("megatron.a.b.f")',
    "tests/unit/test_script.py": 'run(f"python {ROOT}/pretrain.py --lr 1")',
    "tests/unit/test_tool.py": 'run(ROOT / "tools" / "x.py")',
    "tests/unit/test_page.py": 'read("csrc/norm/cpu.cpp")',
    "tests/unit/test_none.py": '"my_pretrain.py x.python"',
    "tests/docs/test_pages.py": "",
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("megatron/a/b.py", "b patched"),
        ("megatron/a/c.py", "b patched script"),
        ("megatron/a/gone.py", ""),
        ("megatron/cli/x.py", "tool"),
        ("tools/x.py", "tool"),
        ("pretrain.py", "script"),
        ("csrc/norm/cpu.cpp", "page"),
        ("tests/unit/test_none.py", "none"),
        ("tests/unit/test_gone.py", ""),
    ],
)
@pytest.mark.parametrize("deleted", [False, True])
def test_a_change_selects_the_tests_that_reach_it(tmp_path: Path, changed: str, expected: str, deleted: bool) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if deleted:
        (tmp_path / changed).unlink(missing_ok=True)
    found = affected([changed], tmp_path)
    assert found == [
        f"tests/unit/test_{name}.py" for name in expected.split() if not (deleted and f"test_{name}.py" in changed)
    ]


def test_a_page_selects_the_tests_of_pages(tmp_path: Path) -> None:
    (tmp_path / "tests/docs").mkdir(parents=True)
    (tmp_path / "tests/docs/test_pages.py").touch()
    assert affected(["docs/training.md"], tmp_path) == ["tests/docs/test_pages.py"]


def test_the_quick_tests_exist() -> None:
    lines = (ROOT / "tests/quick.txt").read_text(encoding="utf-8").splitlines()
    for entry in (line for line in lines if not line.startswith("#")):
        file, _, test = entry.partition("::")
        path = ROOT / file
        assert path.is_file() if file.endswith(".py") else any(path.glob("test_*.py")), entry
        assert f"def {test.partition('[')[0]}" in (path.read_text(encoding="utf-8") if test else "def "), entry

"""Garbage collection is off while a start loads modules."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

from megatron.utils.loading import loading_torch
from tests.helpers.runs import flags

ROOT = Path(__file__).parents[3]

PROGRAM = """
import gc, runpy, sys
seen = []
gc.callbacks.append(lambda phase, info: "torch" in sys.modules and phase == "start" and seen.append(info["generation"]))
sys.path.insert(0, '.')
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name='__main__')
finally:
    print("complete collections:", seen.count(2), "frozen:", gc.get_freeze_count() > 100_000, "on:", gc.isenabled())
"""


def start(*arguments: str) -> str:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()[-1]


def test_training_starts_without_a_complete_collection() -> None:
    assert start("pretrain_gpt.py", *flags(dry_run=True)) == "complete collections: 0 frozen: True on: True"


def test_the_count_sees_collections(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import torch")
    assert "complete collections: 0" not in start(str(tmp_path / "plain.py"))


def test_where_torch_is_loaded_nothing_changes() -> None:
    import torch  # noqa: F401

    before = gc.get_freeze_count()
    with loading_torch():
        assert gc.isenabled()
    assert gc.get_freeze_count() <= before, "some of what was frozen may have died since, and nothing is frozen"


def test_training_loads_no_engine_for_other_models() -> None:
    program = "from megatron.pretrain import pretrain; import megatron.training.assemble, sys; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True).split()
    assert "megatron.training.trainer" in loaded and not [name for name in loaded if "any_model" in name]

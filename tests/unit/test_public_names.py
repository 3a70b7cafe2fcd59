"""Names that users import; other distributions' packages in the namespace `megatron` are found beside them."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = {
    "megatron.pretrain": ("Hook", "pretrain", "setup"),
    "megatron.compat": (
        "OSS",
        "DistributedDataParallel",
        "ShardedDataParallel",
        "add_config_arguments",
        "init_distributed",
        "initialize",
    ),
    "megatron.model": ("GPT",),
    "megatron.version": ("__version__",),
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_there(module: str) -> None:
    offered = import_module(module)
    assert [name for name in PUBLIC[module] if not hasattr(offered, name)] == []
    assert set(PUBLIC[module]) <= set(getattr(offered, "__all__", PUBLIC[module]))


def test_a_name_that_is_not_offered_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'megatron\.compat' has no attribute 'nothing'"):
        _ = import_module("megatron.compat").nothing


@pytest.mark.parametrize("first", [True, False])
def test_parts_of_other_distributions_are_found_beside_ours(tmp_path: Path, first: bool) -> None:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").write_text("__version__ = '0.16.1'\n")
    order = [tmp_path, ROOT] if first else [ROOT, tmp_path]
    code = (
        f"import sys; sys.path[:0] = {[str(path) for path in order]!r}\n"
        "import megatron.core, megatron.pretrain, megatron.version\n"
        "print(megatron.core.__version__, megatron.version.__version__)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == f"0.16.1 {import_module('megatron.version').__version__}\n", done.stderr

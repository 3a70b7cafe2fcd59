"""Messages name the command that exists where the user is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.commands import as_typed_here, build_command


@pytest.mark.parametrize(
    ("checkout", "installed"),
    [
        ("tools/preprocess_data.py makes them", "megatron-preprocess makes them"),
        ("run python tools/convert_checkpoint.py --to hf", "run megatron-convert --to hf"),
        ("torchrun tools/generate.py --load DIR", "torchrun -m megatron.cli.generate --load DIR"),
        ("torchrun --nproc_per_node 2 pretrain_gpt.py -h", "torchrun --nproc_per_node 2 -m megatron.cli.train -h"),
        ("pretrain_gpt.py --load DIR", "megatron-train --load DIR"),
        ("generate.py: error", "megatron-generate: error"),
        ("tools/gpu_check.py is in the sources alone", "tools/gpu_check.py is in the sources alone"),
        ("/data/tools/evaluate.py and my_generate.py", "/data/tools/evaluate.py and my_generate.py"),
    ],
)
def test_where_there_is_no_checkout_the_installed_command_is_named(checkout: str, installed: str) -> None:
    assert as_typed_here(checkout, in_checkout=True) == checkout
    assert as_typed_here(checkout, in_checkout=False) == installed


@pytest.mark.parametrize(
    ("record", "place"),
    [
        ({"url": "file:///a/b%20c", "dir_info": {}}, "file:///a/b%20c"),
        ({"url": "https://host/x", "vcs_info": {"vcs": "git"}}, "git+https://host/x"),
        ({"url": "file:///a.whl", "archive_info": {}}, "--no-binary megatron-anywhere megatron-anywhere"),
        (None, "--no-binary megatron-anywhere megatron-anywhere"),
    ],
)
def test_an_installed_package_is_built_by_installing_it_again(
    record: dict[str, object] | None, place: str, tmp_path: Path
) -> None:
    info = tmp_path / "megatron_anywhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-anywhere\nVersion: 1.0\n")
    if record is not None:
        (info / "direct_url.json").write_text(json.dumps(record))
    assert build_command(tmp_path) == f"pip install --force-reinstall --no-deps {place}"
    assert build_command() == "python csrc/build.py"

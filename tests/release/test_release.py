"""tools/release.py: one version in three files."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.scripts import load_script


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return load_script("tools/release.py")


def write(root: Path, version: str, citation: str, heading: str) -> None:
    (root / "megatron").mkdir()
    (root / "megatron" / "version.py").write_text(f'__version__ = "{version}"\n')
    (root / "CITATION.cff").write_text(f"cff-version: 1.2.0\nversion: {citation}\n")
    (root / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n")


def test_one_version(release: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "0.2.0", "0.2.0", "0.2.0 (2026-12-01)")
    assert release.check_version(tmp_path) == "0.2.0"


@pytest.mark.parametrize(
    ("citation", "heading", "named"),
    [("0.1.0", "0.2.0", "CITATION.cff 0.1.0"), ("0.2.0", "Unreleased", "CHANGELOG.md Unreleased")],
)
def test_another_version_is_named(release: ModuleType, tmp_path: Path, citation: str, heading: str, named: str) -> None:
    write(tmp_path, "0.2.0", citation, heading)
    with pytest.raises(release.ReleaseError, match=f"^{named}: megatron/version.py has 0.2.0"):
        release.check_version(tmp_path)

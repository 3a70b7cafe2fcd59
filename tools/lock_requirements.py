"""Writes constraints.lock: the pins of constraints.txt with the SHA-256 of every file that the index has of them.

    pip install uv && python tools/lock_requirements.py        # after a change of constraints.txt

The set-up (tools/setup_environment.py) installs what has a checksum there, and nothing else. Standard library only.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# Made by tools/lock_requirements.py from constraints.txt: the checksums of all files of each version, for all
# platforms. The set-up installs nothing else (docs/getting_started.md).
"""


class NoChecksumError(Exception):
    """Something would be installed that the lock does not know."""


@dataclass(frozen=True)
class Locked:
    """One version and the checksums of its files, each as sha256:..."""

    version: str
    hashes: tuple[str, ...]


def project_name(requirement: str) -> str:
    """'PyYAML>=6.0' -> 'pyyaml', spelled as package indexes compare names."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", found.group()).lower() if found else ""


def read_lock(text: str) -> dict[str, Locked]:
    lock = {}
    for line in text.replace("\\\n", " ").splitlines():
        found = re.match(r"[\w.-]+==([^\s;]+)", line)
        if found:
            lock[project_name(line)] = Locked(found[1], tuple(re.findall(r"--hash=(sha256:[0-9a-f]{64})", line)))
    return lock


def of_other_versions(report: Mapping[str, Any], lock: Mapping[str, Locked]) -> list[str]:
    """The pins of what pip would install in another version than the locked one: a package that was there already and
    is too old, for example."""
    chosen = [(project_name(name), version) for name, version in _chosen(report)]
    return [
        f"{name}=={lock[name].version}"
        for name, version in chosen
        if name in lock and version not in (lock[name].version, _local(name, version, lock))
    ]


def hashed_lines(report: Mapping[str, Any], lock: Mapping[str, Locked]) -> list[str]:
    """What pip's installation report would install, as requirements for --require-hashes.

    A build of torch for one device ("2.13.0+cpu") is in no public index. It comes from an index that the user gave, as
    docs/getting_started.md says, and is taken with the checksum of that index.
    """
    lines = []
    for (name, version), item in zip(_chosen(report), report["install"], strict=True):
        locked = lock.get(project_name(name), Locked("", ()))
        hashes = locked.hashes if version == locked.version else ()
        if version == _local(project_name(name), version, lock):
            archive = item.get("download_info", {}).get("archive_info", {})
            told = archive.get("hashes") or dict([archive.get("hash", "=").split("=", 1)])  # pip before 23.1
            hashes = (f"sha256:{told['sha256']}",) if "sha256" in told else ()
        if not hashes:
            known = f"the lock has {locked.version}" if locked.version else "the lock does not have it"
            raise NoChecksumError(
                f"{name} {version} would be installed; constraints.lock has no checksum of it ({known}): install it "
                "(or torch, if that brings it) into that Python yourself; what is there is used as it is"
            )
        lines.append(" ".join([f"{name}=={version}", *(f"--hash={value}" for value in hashes)]))
    return lines


def _chosen(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(item["metadata"]["name"], item["metadata"]["version"]) for item in report["install"]]


def _local(name: str, version: str, lock: Mapping[str, Locked]) -> str | None:
    """`version`, if it is a build of the locked torch for one device."""
    is_build = name == "torch" and "torch" in lock and version.startswith(lock["torch"].version + "+")
    return version if is_build else None


def compile_lock(uv: Sequence[str], constraints: Path) -> str:
    """The checksums come from the index, through uv: it alone asks for those of all platforms at once."""
    command = [*uv, "pip", "compile", "--no-deps", "--generate-hashes", "--universal", "--python-version", "3.11"]
    done = subprocess.run(
        [*command, "--no-header", "--no-annotate", "--quiet", str(constraints)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"error: uv could not make the lock:\n{done.stderr.strip()}")
    return HEADER + done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    uv = shutil.which("uv")
    if uv is None:
        print("error: uv is not there, which makes the lock: pip install uv", file=sys.stderr)
        return 2
    (ROOT / "constraints.lock").write_text(compile_lock([uv], ROOT / "constraints.txt"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Checks the Dockerfile and its .dockerignore without building: what they copy is enough."""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launchers import clean_environment
from tests.policy.rules import ROOT, repository_files


def instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


DOCKERFILE = instructions((ROOT / "Dockerfile").read_text())


def is_sent(path: str, ignore: str) -> bool:
    """Returns whether the builder sees a file: the last line that matches it, or a folder above it, decides."""
    sent, above = True, [path, *(str(parent) for parent in Path(path).parents)][:-1]
    for line in ignore.splitlines():
        pattern = line.removeprefix("!")
        if not line or line.startswith("#"):
            continue
        names = [Path(name).name for name in above] if pattern.startswith("**/") else above
        wanted = pattern.removeprefix("**/")
        if any(fnmatch.fnmatchcase(name, wanted) and (wanted != "*" or "/" not in name) for name in names):
            sent = line.startswith("!")
    return sent


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that the image would have."""
    target, ignore = tmp_path_factory.mktemp("image"), (ROOT / ".dockerignore").read_text()
    files = [path.relative_to(ROOT).as_posix() for path in repository_files()]
    for name, rest in DOCKERFILE:
        if name != "COPY":
            continue
        *sources, to = [word for word in shlex.split(rest) if not word.startswith("--")]
        for source in sources:
            found = [file for file in files if file == source or file.startswith(f"{source.rstrip('/')}/")]
            assert found, f"COPY {source}: no such file"
            lost = [file for file in found if not is_sent(file, ignore)]
            assert not lost, f".dockerignore keeps back {lost[:3]}"
            assert to == "./" or to == source, "each folder keeps its name"
            for file in found:
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, target / file)
    return target


def test_what_is_copied_trains_and_installs(image: Path) -> None:
    """The image's commands find all files that they read; tests/unit/tools covers setup_environment itself."""
    done = subprocess.run(
        ["bash", "examples/qwen3_0.6b.sh", "--dry-run"],
        cwd=image,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "pretrain_gpt.py --config qwen3-0.6b" in done.stdout, done.stderr
    reads = (
        "import sys; sys.path.insert(0, '.')\n"
        "from tools import setup_environment as s\n"
        "assert s.wanted(()) and s.fingerprint('') and (s.ROOT / 'csrc' / 'build.py').is_file()\n"
    )
    for command in ([sys.executable, "-c", reads], [sys.executable, "setup.py", "--version"]):
        done = subprocess.run(command, cwd=image, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_every_command_is_shell_that_finds_what_it_calls(image: Path) -> None:
    commands = [rest for name, rest in DOCKERFILE if name == "RUN"]
    for command in commands:
        assert subprocess.run(["bash", "-n", "-c", command]).returncode == 0
    script = shlex.split(commands[-1])[-1]
    assert script.split(" && ") == [". examples/setup.sh", "setup_environment"]
    there = subprocess.run(["bash", "-c", ". examples/setup.sh && declare -F setup_environment"], cwd=image)
    assert there.returncode == 0


def test_the_base_is_pinned_and_nothing_runs_as_root() -> None:
    names = [name for name, _ in DOCKERFILE]
    assert re.fullmatch(r"[\w./-]+:\d[\w.-]*", DOCKERFILE[0][1]) and names.count("FROM") == 1
    users = [rest for name, rest in DOCKERFILE if name == "USER"]
    assert users == ["trainer"] and "useradd" in DOCKERFILE[1][1] and "trainer" in DOCKERFILE[1][1]
    after = DOCKERFILE[names.index("USER") :]
    assert {"COPY", "RUN", "CMD"} <= {name for name, _ in after}
    assert all("--chown=trainer:trainer" in rest for name, rest in DOCKERFILE if name == "COPY")


def test_what_users_leave_in_a_checkout_stays_out() -> None:
    ignore = (ROOT / ".dockerignore").read_text()
    left = ["corpus_content_document.bin", "experiments/a/iter_0000002/manifest.json", ".git/HEAD", ".venv/bin/python",
            "megatron/ops/_kernels.so", "megatron/data/_helpers.cpython-312.so", "tools/__pycache__/a.pyc"]  # fmt: skip
    assert [path for path in left if is_sent(path, ignore)] == []
    assert is_sent("megatron/ops/ref.py", ignore) and is_sent("csrc/norm/math.h", ignore)

"""The set-up with fake torch packages on the path: nothing is downloaded, and the real one is not touched."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.scripts import load_script

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ("tools/setup_environment.py", "tools/lock_requirements.py", "examples/setup.sh")
VENDOR = "2.10.0a0+b558c986e8.nv25.11"


@pytest.fixture(scope="module")
def setup_module() -> ModuleType:
    return load_script("tools/setup_environment.py")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Files that the set-up reads of a checkout; without csrc it has nothing to build."""
    root = tmp_path / "checkout"
    for name in (*SCRIPTS, "requirements.txt", "constraints.txt", "constraints.lock"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    shutil.copy(ROOT / "pyproject.toml", root / "pyproject.toml")
    return root


def fake_torch(folder: Path, version: str, body: str = "") -> Path:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(f"__version__ = {version!r}\n{body}\n")
    return folder


def set_up(
    checkout: Path, *, python_path: Path | None = None, python: str = sys.executable, extra: str = ""
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": python, "PYTHONPATH": str(python_path or "")}
    script = f"set -euo pipefail; . examples/setup.sh; setup_environment {extra}; echo using $PYTHON"
    command = ["bash", "-c", script]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)


def marker(checkout: Path) -> dict:
    return json.loads((checkout / ".venv" / "megatron-setup.json").read_text())


# ---------------------------------------------------------------- the parts


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.13.0+cpu", (2, 13, 0)), (VENDOR, (2, 10, 0)), ("2.9.1", (2, 9, 1)), ("2.10", (2, 10)), ("unknown", ())],
)
def test_vendor_versions_count_as_the_release_they_became(
    setup_module: ModuleType, version: str, release: tuple[int, ...]
) -> None:
    assert setup_module.release_tuple(version) == release


def test_torch_is_found_without_importing_it(
    setup_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_torch(tmp_path, VENDOR, body="raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    found = setup_module.outside_torch()
    assert (found.version, found.path) == (VENDOR, str(tmp_path / "torch"))


@pytest.mark.parametrize("version", ["2.9.1", "1.13.0", "2.4.0a0+gitabc", "unknown"])
def test_a_torch_that_is_too_old_is_refused(setup_module: ModuleType, version: str) -> None:
    with pytest.raises(setup_module.SetupError) as error:
        setup_module.check_torch(setup_module.Torch(version, "/usr/lib/torch"))
    assert version in str(error.value) and "2.10" in str(error.value) and "PYTHON=" in str(error.value)


def test_beside_a_found_torch_nothing_that_is_there_is_pinned(setup_module: ModuleType) -> None:
    requirements, constraints = setup_module.pip_inputs(["test"], setup_module.Torch(VENDOR, "/usr/lib/torch"))
    assert not any(setup_module.project_name(line) == "torch" for line in requirements)
    assert f"torch=={VENDOR}" in constraints
    assert not any(line.startswith("numpy==") for line in constraints), "numpy is installed here: it stays as it is"


def test_pip_is_told_the_version_that_it_knows(setup_module: ModuleType, tmp_path: Path) -> None:
    """The public index's wheels lack the CUDA build that `torch.__version__` names. Without metadata (a build on
    PYTHONPATH) the imported torch counts, not another one further along the path."""
    torch = setup_module.Torch("2.14.1+cu130", str(fake_torch(tmp_path, "2.14.1+cu130") / "torch"))
    assert "torch==2.14.1+cu130" in setup_module.pip_inputs([], torch)[1]
    metadata = tmp_path / "torch-2.14.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.14.1\n")
    assert "torch==2.14.1" in setup_module.pip_inputs([], torch)[1]


def test_without_torch_everything_is_pinned(setup_module: ModuleType) -> None:
    requirements, constraints = setup_module.pip_inputs(["test"], None)
    pinned = {setup_module.project_name(line) for line in constraints if "==" in line}
    assert "torch==2.13.0" in constraints
    assert {setup_module.project_name(line) for line in requirements} <= pinned


def test_requirements_say_what_pyproject_says(setup_module: ModuleType) -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    expected = [*project["dependencies"], *project["optional-dependencies"]["hf"]]
    assert setup_module.requirement_lines(ROOT / "requirements.txt") == expected


def test_pip_leaves_a_vendors_torch_where_it_is(setup_module: ModuleType) -> None:
    """`pip install -r requirements.txt` in a container replaces what does not satisfy the requirement."""
    from packaging.requirements import Requirement

    (line,) = [line for line in setup_module.requirement_lines(ROOT / "requirements.txt") if line.startswith("torch")]
    wanted = Requirement(line).specifier
    assert wanted.contains(VENDOR) and wanted.contains("2.13.0+cpu") and not wanted.contains("2.9.1")


class TestLock:
    """constraints.lock, and the requirements that pip installs from it."""

    def test_it_agrees_with_the_constraints(self, setup_module: ModuleType) -> None:
        lock = setup_module.read_lock((ROOT / "constraints.lock").read_text())
        pins = setup_module.requirement_lines(ROOT / "constraints.txt")
        pinned = {setup_module.project_name(line): line.partition("==")[2] for line in pins}
        way_out = "python tools/lock_requirements.py"
        assert {name: locked.version for name, locked in lock.items()} == pinned, way_out
        assert all(locked.hashes for locked in lock.values()), way_out
        assert len(lock["numpy"].hashes) > 20, "the files of every platform and Python"

    LOCK = f"""# a comment
A_b==1.0 \\
    --hash=sha256:{"a" * 64} \\
    --hash=sha256:{"b" * 64}
torch==2.13.0 --hash=sha256:{"c" * 64}
"""

    @staticmethod
    def report(*chosen: tuple[str, str]) -> dict:
        archive = {"archive_info": {"hashes": {"sha256": "d" * 64}}}
        return {"install": [{"metadata": {"name": n, "version": v}, "download_info": archive} for n, v in chosen]}

    def test_every_line_has_the_checksums_of_the_lock(self, setup_module: ModuleType) -> None:
        lock = setup_module.read_lock(self.LOCK)
        report = self.report(("a.b", "1.0"), ("torch", "2.13.0"))
        assert setup_module.hashed_lines(report, lock) == [
            f"a.b==1.0 --hash=sha256:{'a' * 64} --hash=sha256:{'b' * 64}",
            f"torch==2.13.0 --hash=sha256:{'c' * 64}",
        ]

    def test_a_build_of_torch_has_the_checksum_of_its_own_index(self, setup_module: ModuleType) -> None:
        lock, report = setup_module.read_lock(self.LOCK), self.report(("torch", "2.13.0+cpu"))
        assert setup_module.hashed_lines(report, lock) == [f"torch==2.13.0+cpu --hash=sha256:{'d' * 64}"]
        assert setup_module.of_other_versions(report, lock) == []
        report["install"][0]["download_info"] = {"archive_info": {"hash": f"sha256={'e' * 64}"}}  # pip 23.0
        assert setup_module.hashed_lines(report, lock) == [f"torch==2.13.0+cpu --hash=sha256:{'e' * 64}"]
        report["install"][0]["download_info"] = {"archive_info": {}}
        with pytest.raises(setup_module.NoChecksumError):
            setup_module.hashed_lines(report, lock)

    @pytest.mark.parametrize("name", [("a-b", "1.1"), ("a-b", "1.0+evil"), ("unknown", "1"), ("torch", "2.13.1+cpu")])
    def test_what_the_lock_does_not_have_is_refused(self, setup_module: ModuleType, name: tuple[str, str]) -> None:
        with pytest.raises(setup_module.NoChecksumError) as error:
            setup_module.hashed_lines(self.report(name), setup_module.read_lock(self.LOCK))
        assert " ".join(name) in str(error.value) and "into that Python yourself" in str(error.value)

    def test_another_version_is_asked_for_again(self, setup_module: ModuleType) -> None:
        report = self.report(("a.b", "1.1"), ("unknown", "1"), ("torch", "2.13.0"))
        assert setup_module.of_other_versions(report, setup_module.read_lock(self.LOCK)) == ["a-b==1.0"]


def wheel(folder: Path, body: str) -> str:
    """Writes a wheel of a package with one module, and returns its checksum."""
    folder.mkdir(exist_ok=True)
    path, info = folder / "megatron_anywhere_tiny-1.0-py3-none-any.whl", "megatron_anywhere_tiny-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("megatron_anywhere_tiny.py"), body)
        archive.writestr(
            zipfile.ZipInfo(f"{info}/METADATA"), "Metadata-Version: 2.1\nName: megatron-anywhere-tiny\nVersion: 1.0\n"
        )
        archive.writestr(
            zipfile.ZipInfo(f"{info}/WHEEL"), "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_that_is_not_the_locked_one_is_not_installed(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor, index = fake_torch(tmp_path / "vendor", VENDOR), tmp_path / "index"
    right = wheel(index, "value = 1")
    for name, line in {
        "requirements.txt": "megatron-anywhere-tiny",
        "constraints.txt": "megatron-anywhere-tiny==1.0",
        "constraints.lock": f"megatron-anywhere-tiny==1.0 --hash=sha256:{right}",
    }.items():
        (checkout / name).write_text((checkout / name).read_text() + line + "\n")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{os.environ.get('PIP_FIND_LINKS', '')} {index}")
    wheel(index, "value = 'of a stranger'")
    done = set_up(checkout, python_path=vendor)
    assert done.returncode == 2 and "DO NOT MATCH THE HASHES" in done.stdout, done.stdout + done.stderr
    assert not list((checkout / ".venv").glob("lib/python3*/site-packages/megatron_anywhere_tiny.py"))
    assert wheel(index, "value = 1") == right
    assert set_up(checkout, python_path=vendor).returncode == 0
    commands = re.findall(r"^\$ (.*--require-hashes.*)", (checkout / ".venv" / "setup.log").read_text(), re.MULTILINE)
    assert len(commands) == 1 and "--no-index" in commands[0], "the index is not searched twice"
    (installed,) = (checkout / ".venv").glob("lib/python3*/site-packages/megatron_anywhere_tiny.py")
    assert list(installed.parent.glob("__pycache__/megatron_anywhere_tiny.*.pyc")), "what is installed is compiled"


@pytest.mark.parametrize(("answers", "searched"), [([True], [False]), ([False, True], [False, True])])
def test_the_index_is_searched_again_only_where_its_links_fail(
    setup_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[bool], searched: list[bool]
) -> None:
    calls, left = [], list(answers)
    monkeypatch.setattr(setup_module, "pip_succeeds", lambda venv, options: calls.append(list(options)) or left.pop(0))
    url = "https://index/a-1.0%2Bcpu.whl?x=1&y=2"
    (tmp_path / "report.json").write_text(json.dumps({"install": [{"download_info": {"url": url}}]}))
    setup_module.install_locked(tmp_path, ["a==1.0 --hash=sha256:b"])
    assert ["--no-index" not in options for options in calls] == searched
    assert all({"--require-hashes", "--no-deps", str(tmp_path / "locked.txt")} <= set(options) for options in calls)
    assert (tmp_path / "chosen.html").read_text() == f'<a href="{url.replace("&", "&amp;")}"></a>\n'


def test_the_tests_also_have_the_oldest_supported_transformers(
    setup_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(setup_module, "pip_succeeds", lambda venv, options: calls.append(list(options)) or True)
    setup_module.install_old_transformers(tmp_path)
    (options,) = calls
    assert {"--no-deps", "--require-hashes", "--target", str(tmp_path / "transformers-4.57")} <= set(options)
    lock, extras = setup_module.read_lock(Path(options[-1]).read_text()), (ROOT / "pyproject.toml").read_text()
    assert 'hf = ["transformers>=4.57"]' in extras and lock["transformers"].version.startswith("4.57.")
    assert all(locked.hashes for locked in lock.values())


# ---------------------------------------------------------------- the whole, as quickstart.sh calls it


def test_a_vendor_torch_is_used_and_the_second_run_does_nothing(checkout: Path, tmp_path: Path) -> None:
    """The tests' interpreter has everything but this torch, so pip has nothing to download."""
    vendor = fake_torch(tmp_path / "vendor", VENDOR)
    first = set_up(checkout, python_path=vendor)
    assert first.returncode == 0, first.stdout + first.stderr
    assert f"torch {VENDOR} is already here and is used" in first.stdout
    assert not list((checkout / ".venv").glob("lib/python3*/site-packages/torch")), "torch was installed over it"
    log = (checkout / ".venv" / "setup.log").read_text()
    assert "Downloading torch" not in log and "torch-2" not in log
    launcher = checkout / ".venv" / "bin" / "torchrun"  # pip makes it where torch itself is
    assert os.access(launcher, os.X_OK), "the README's torchrun, in an environment that has torch from outside"
    assert f"{checkout}/.venv/bin/python" in launcher.read_text()

    second = set_up(checkout, python_path=vendor)
    assert "is up to date" in second.stdout and "installing" not in second.stdout
    assert second.stdout.rstrip().endswith(f"using {checkout}/.venv/bin/python")


def test_an_interrupted_set_up_is_made_again(checkout: Path, tmp_path: Path) -> None:
    vendor = fake_torch(tmp_path / "vendor", VENDOR)
    half = checkout / ".venv"
    (half / "lib").mkdir(parents=True)
    (half / "lib" / "half-written").touch()
    (half / "megatron-setup.json").write_text(json.dumps({"state": "building", "made_here": True, "python": "x"}))
    done = set_up(checkout, python_path=vendor)
    assert done.returncode == 0, done.stdout + done.stderr
    assert marker(checkout)["state"] == "ready" and not (half / "lib" / "half-written").exists()

    # A changed requirement is installed on top; another torch means another environment.
    (checkout / "requirements.txt").write_text((checkout / "requirements.txt").read_text() + "pip\n")
    (half / "kept").touch()
    assert "installing" in set_up(checkout, python_path=vendor).stdout and (half / "kept").exists()
    other = fake_torch(tmp_path / "other", "2.12.0+vendor")
    assert set_up(checkout, python_path=other).returncode == 0
    assert not (half / "kept").exists() and marker(checkout)["torch_version"] == "2.12.0+vendor"


BUILD = """
import pathlib, signal, sys, time
here = pathlib.Path(__file__).parent
signal.signal(signal.SIGTERM, lambda *_: sys.exit((here / "stopped").touch()))
(here / "started").write_text("yes")
time.sleep(60)
"""


def test_kernels_are_compiled_beside_the_installation(
    setup_module: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build runs while pip does; a failing installation ends it."""
    (checkout / "csrc").mkdir()
    (checkout / "csrc" / "build.py").write_text(BUILD)
    started, stopped = checkout / "csrc" / "started", checkout / "csrc" / "stopped"
    monkeypatch.setattr(setup_module, "ROOT", checkout)
    monkeypatch.setattr(setup_module, "compiler", lambda: "c++")

    with pytest.raises(setup_module.SetupError, match="no index"), setup_module.kernels_ahead():
        while not started.exists() or not started.read_text():
            time.sleep(0.01)
        raise setup_module.SetupError("no index")
    assert stopped.exists()


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def test_an_unsuitable_torch_is_refused_in_one_line(checkout: Path, tmp_path: Path) -> None:
    refused(set_up(checkout, python_path=fake_torch(tmp_path / "old", "2.4.1")), "2.4.1", "2.10 or newer", "PYTHON=")
    broken = fake_torch(tmp_path / "broken", VENDOR, body="raise ImportError('libcudart.so.13 is missing')")
    refused(set_up(checkout, python_path=broken), "libcudart.so.13 is missing", VENDOR)
    assert not (checkout / ".venv").exists()


def test_a_python_that_does_not_run_is_passed_over(checkout: Path, tmp_path: Path) -> None:
    """Version managers leave commands on the PATH that only print an error."""
    shims = tmp_path / "shims"
    shims.mkdir()
    for name in ("python3", "python", "python3.13", "python3.12", "python3.11"):
        (shims / name).write_text("#!/bin/sh\necho 'command not found' >&2\nexit 127\n")
        (shims / name).chmod(0o755)
    script = "set -euo pipefail; . examples/setup.sh; find_python"
    environment = {**os.environ, "PATH": f"{shims}:/usr/bin:/bin"}
    environment.pop("PYTHON", None)
    command = ["bash", "-c", script]
    none = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    refused(none, "3.11, 3.12 or 3.13", "PYTHON=")
    (shims / "python3.12").unlink()
    (shims / "python3.12").symlink_to(sys.executable)
    found = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    assert found.stdout.strip() == "python3.12"


def test_a_folder_that_is_not_ours_is_left_alone(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "precious").touch()
    refused(set_up(checkout), "not made by this script")
    assert (checkout / ".venv" / "precious").exists()


def test_the_users_own_environment_is_used_as_it_is(checkout: Path, tmp_path: Path) -> None:
    vendor = fake_torch(tmp_path / "vendor", VENDOR)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(checkout / ".venv")], check=True)
    theirs = checkout / ".venv"
    outer = next(path for path in sys.path if path.endswith("site-packages"))
    site_packages = next(theirs.glob("lib/python3*/site-packages"))
    (site_packages / "all.pth").write_text(f"import site; site.addsitedir({outer!r})\n")
    (theirs / "precious").touch()
    for expected in ("is already here and is used", "is up to date"):
        done = set_up(checkout, python_path=vendor)
        assert done.returncode == 0 and expected in done.stdout, done.stdout + done.stderr
    assert (theirs / "precious").exists() and not marker(checkout)["made_here"]

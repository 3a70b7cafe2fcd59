"""The set-up with fake torch packages on the path: nothing is downloaded, and the real one is not touched."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("tools/setup_environment.py", "examples/setup.sh")
VENDOR = "2.10.0a0+b558c986e8.nv25.11"


@pytest.fixture(scope="module")
def setup_module() -> ModuleType:
    return load_script("tools/setup_environment.py")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Files that the set-up reads of a checkout; without csrc it has nothing to build."""
    root = tmp_path / "checkout"
    for name in (*SCRIPTS, "requirements.txt", "constraints.lock"):
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
    assert found == f"{VENDOR} in {tmp_path / 'torch'}"


@pytest.mark.parametrize("version", ["2.9.1", "1.13.0", "2.4.0a0+gitabc", "unknown"])
def test_a_torch_that_is_too_old_is_refused(setup_module: ModuleType, version: str) -> None:
    with pytest.raises(setup_module.SetupError) as error:
        setup_module.check_torch(f"{version} in /usr/lib/torch")
    assert version in str(error.value) and "2.10" in str(error.value) and "PYTHON=" in str(error.value)


def test_requirements_say_what_pyproject_says(setup_module: ModuleType) -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    expected = [*project["dependencies"], *project["optional-dependencies"]["hf"]]
    assert setup_module.wanted(())[: len(expected)] == expected


def test_pip_leaves_a_vendors_torch_where_it_is(setup_module: ModuleType) -> None:
    """`pip install -r requirements.txt` in a container replaces what does not satisfy the requirement."""
    from packaging.requirements import Requirement

    (line,) = [line for line in setup_module.wanted(()) if line.startswith("torch")]
    wanted = Requirement(line).specifier
    assert wanted.contains(VENDOR) and wanted.contains("2.13.0+cpu") and not wanted.contains("2.9.1")


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


class TestLock:
    """constraints.lock, and what is installed from it."""

    def test_it_agrees_with_the_constraints(self, setup_module: ModuleType) -> None:
        lock = setup_module.read_lock((ROOT / "constraints.lock").read_text())
        fix = "run the command in the first lines of constraints.lock"
        pins = {setup_module.project_name(name): version for name, version in pinned().items()}
        versions = {name: locked.pin.split()[0].partition("==")[2] for name, locked in lock.items()}
        assert pins.items() <= versions.items(), fix
        assert all(locked.hashes for locked in lock.values()), fix
        assert len(lock["numpy"].hashes) > 20, "the files of every platform and Python"

    def test_it_has_all_that_the_project_asks_for(self, setup_module: ModuleType) -> None:
        lock = setup_module.read_lock((ROOT / "constraints.lock").read_text())
        roots = {
            setup_module.project_name(line)
            for line in setup_module.wanted(["test", "data", "plot", "wandb", "release", "docs"])
        }
        needed = setup_module.closure(lock, roots)
        assert needed == set(lock), "nothing is missing, and nothing is left over"
        plain = setup_module.closure(lock, {setup_module.project_name(line) for line in setup_module.wanted(())})
        assert {"huggingface-hub", "triton"} <= plain and not plain & {"pytest", "moto", "wandb"}

    LOCK = f"""# a comment
A_b==1.0 ; sys_platform == 'linux' \\
    --hash=sha256:{"a" * 64} \\
    --hash=sha256:{"b" * 64}
    # via torch, -c constraints.txt
c==2 --hash=sha256:{"d" * 64}
    # via a-b
torch==2.13.0 --hash=sha256:{"c" * 64}
"""

    def test_its_lines(self, setup_module: ModuleType) -> None:
        lock = setup_module.read_lock(self.LOCK)
        hashes = (f"--hash=sha256:{'a' * 64}", f"--hash=sha256:{'b' * 64}")
        assert lock["a-b"] == ("A_b==1.0 ; sys_platform == 'linux'", hashes, {"torch", "-c constraints.txt"})
        assert (lock["c"].pin, lock["torch"].pin) == ("c==2", "torch==2.13.0")
        assert setup_module.closure(lock, ["torch"]) == {"torch", "a-b", "c"}

    @staticmethod
    def chosen(version: str, archive: dict) -> dict:
        return {"metadata": {"version": version}, "download_info": {"archive_info": archive}}

    def test_a_build_of_torch_has_the_checksum_of_its_own_index(self, setup_module: ModuleType) -> None:
        torch = setup_module.read_lock(self.LOCK)["torch"]
        assert setup_module.with_build(torch, self.chosen("2.13.0", {"hash": "sha256=0"})) == torch
        built = setup_module.with_build(torch, self.chosen("2.13.0+cpu", {"hashes": {"sha256": "d" * 64}}))
        assert (built.pin, built.hashes) == ("torch==2.13.0+cpu", (f"--hash=sha256:{'d' * 64}",))
        old_pip = self.chosen("2.13.0+cpu", {"hash": f"sha256={'e' * 64}"})  # pip 23.0
        assert setup_module.with_build(torch, old_pip).hashes == (f"--hash=sha256:{'e' * 64}",)
        for version, archive in {"2.13.0+cpu": {}, "2.13.1+cpu": {"hash": "sha256=0"}, "2.14.0": {}}.items():
            with pytest.raises(setup_module.SetupError, match=re.escape(version)):
                setup_module.with_build(torch, self.chosen(version, archive))


# ---------------------------------------------------------------- an index of small wheels, and a Python without torch


def wheel(folder: Path, name: str, version: str, body: str = "", requires: tuple[str, ...] = ()) -> str:
    """Writes a wheel of a package of one module; returns its line of a lock."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    wheel_file = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {f"{name}.py": body, f"{info}/METADATA": "\n".join(metadata) + "\n", f"{info}/WHEEL": wheel_file}
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": ""}.items():
            archive.writestr(zipfile.ZipInfo(file), text)
    return f"{name}=={version.partition('+')[0]} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture
def index(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only place where pip looks, with all that the checkout wants; its torch is for CPUs."""
    folder = tmp_path / "index"
    folder.mkdir()
    names = ("numpy", "tokenizers", "transformers", "yaml", "needed_by_torch", "needed")
    lock = {name: wheel(folder, name, "1.0") for name in names}
    lock |= {name: wheel(folder, name, "100.0") for name in ("setuptools", "pybind11")}
    wheel(folder, "torch", "2.13.0+cpu", "__version__ = '2.13.0+cpu'", ("needed_by_torch", "other; extra == 'more'"))
    lock |= {"torch": f"torch==2.13.0 --hash=sha256:{'0' * 64}\n", "cuda": f"cuda==13 --hash=sha256:{'0' * 64}\n"}
    via = {"needed_by_torch": "torch", "needed": "transformers", "cuda": "torch"}
    lines = [line + (f"    # via {via[name]}\n" if name in via else "") for name, line in lock.items()]
    (checkout / "constraints.lock").write_text("".join(lines))
    (checkout / "requirements.txt").write_text("torch>=2.10.0a0\nnumpy\ntokenizers\ntransformers\nyaml\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def plain_python(tmp_path: Path) -> str:
    """A Python that has neither torch nor pip."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "plain")], check=True)
    return str(tmp_path / "plain" / "bin" / "python")


def pip_calls(checkout: Path) -> list[str]:
    return re.findall(r"^\$ (.* install .*)", (checkout / ".venv" / "setup.log").read_text(), re.MULTILINE)


def installed(checkout: Path) -> set[str]:
    return {path.name.split("-")[0] for path in checkout.glob(".venv/lib/python3*/site-packages/*.dist-info")}


def test_without_torch_all_is_installed_from_the_lock(checkout: Path, index: Path, plain_python: str) -> None:
    """pip chooses the build of torch, and resolves nothing; what only the locked build needs is not installed."""
    done = set_up(checkout, python=plain_python)
    assert done.returncode == 0, done.stdout + done.stderr
    choose, install = pip_calls(checkout)
    assert "--dry-run" in choose and choose.endswith("--no-deps torch==2.13.0")
    assert all(f" {word} " in install for word in ("--only-binary :all:", "--no-deps", "--require-hashes"))
    assert {"torch", "transformers", "needed_by_torch", "needed"} <= installed(checkout) and "cuda" not in installed(
        checkout
    )
    assert list(checkout.glob(".venv/lib/python3*/site-packages/__pycache__/torch.*.pyc")), (
        "what is imported is compiled"
    )
    assert (marker(checkout)["found"], marker(checkout)["torch_version"]) == ("", "2.13.0+cpu")
    assert "is up to date" in set_up(checkout, python=plain_python).stdout


def test_the_script_may_be_executed(checkout: Path, index: Path, plain_python: str) -> None:
    environment = {**os.environ, "PYTHON": plain_python}
    command = ["bash", "examples/setup.sh"]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "source .venv/bin/activate" and "torch" in installed(checkout)


def test_a_file_that_is_not_the_locked_one_is_not_installed(checkout: Path, index: Path, plain_python: str) -> None:
    right = (checkout / "constraints.lock").read_text()
    wheel(index, "needed", "1.0", "value = 'of a stranger'")
    done = set_up(checkout, python=plain_python)
    assert done.returncode == 2 and "DO NOT MATCH THE HASHES" in done.stdout, done.stdout + done.stderr
    assert not {"needed", "torch"} & installed(checkout), "nothing is installed before all is checked"
    assert marker(checkout)["state"] == "building"
    assert wheel(index, "needed", "1.0") in right
    assert set_up(checkout, python=plain_python).returncode == 0 and "needed" in installed(checkout)


def test_an_archive_of_sources_is_not_installed(checkout: Path, index: Path, plain_python: str) -> None:
    """Running its setup.py would execute a stranger's code."""
    (index / "needed-1.0-py3-none-any.whl").unlink()
    source = index / "needed-1.0.tar.gz"
    with tarfile.open(source, "w:gz") as archive:
        (index.parent / "setup.py").write_text("raise SystemExit('it ran')\n")
        archive.add(index.parent / "setup.py", "needed-1.0/setup.py")
    lock, checksum = checkout / "constraints.lock", hashlib.sha256(source.read_bytes()).hexdigest()
    lock.write_text(
        re.sub(r"^needed==.*", f"needed==1.0 --hash=sha256:{checksum}", lock.read_text(), flags=re.MULTILINE)
    )
    done = set_up(checkout, python=plain_python)
    assert done.returncode == 2 and "No matching distribution found for needed" in done.stdout, done.stdout


def test_what_the_lock_does_not_have_is_refused(checkout: Path, index: Path, plain_python: str) -> None:
    (checkout / "requirements.txt").write_text((checkout / "requirements.txt").read_text() + "stranger\n")
    wheel(index, "stranger", "1.0")
    refused(set_up(checkout, python=plain_python), "stranger", "no checksum", "into that Python")
    vendor = fake_torch(checkout.parent / "vendor", VENDOR)
    shutil.rmtree(checkout / ".venv")
    refused(set_up(checkout, python=plain_python, python_path=vendor), "stranger", "no checksum")


def test_beside_a_vendors_torch_only_what_is_missing_is_installed(
    checkout: Path, index: Path, plain_python: str
) -> None:
    """The numpy that was chosen with that torch stays, and a package that is too old is replaced."""
    vendor = fake_torch(checkout.parent / "vendor", VENDOR)
    for name, version in {"numpy": "0.9", "tokenizers": "0.1"}.items():
        with zipfile.ZipFile(index / f"{name}-1.0-py3-none-any.whl") as archive:
            archive.extractall(vendor)
        metadata = vendor / f"{name}-1.0.dist-info" / "METADATA"
        metadata.write_text(metadata.read_text().replace("1.0", version))
        metadata.parent.rename(vendor / f"{name}-{version}.dist-info")
    requirements = checkout / "requirements.txt"
    requirements.write_text(requirements.read_text().replace("tokenizers", "tokenizers>=0.5"))
    done = set_up(checkout, python=plain_python, python_path=vendor)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"tokenizers", "transformers"} <= installed(checkout) and not {"numpy", "torch"} & installed(checkout)


@pytest.mark.parametrize("code", [0, 1])
def test_uv_installs_the_same_lines_and_pip_where_it_fails(
    checkout: Path, index: Path, plain_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    (tmp_path / "bin").mkdir()
    uv = tmp_path / "bin" / "uv"
    uv.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\nif {code}: sys.exit(1)\n"
        'python = sys.argv[sys.argv.index("--python") + 1]\n'
        'sys.exit(subprocess.call([python, "-m", "pip", "install", *sys.argv[-4:]]))\n'
    )
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{uv.parent}:{os.environ['PATH']}")
    done = set_up(checkout, python=plain_python)
    assert done.returncode == 0, done.stdout + done.stderr
    _, by_uv, *by_pip = pip_calls(checkout)
    assert by_uv.startswith(f"{uv} pip install") and f"--find-links={index}" in by_uv
    assert all(f" {word} " in by_uv for word in ("--only-binary :all:", "--no-deps", "--require-hashes"))
    assert len(by_pip) == code and "torch" in installed(checkout)


@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")
def test_the_real_uv_keeps_the_same_promises(
    checkout: Path, index: Path, plain_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_NO_CACHE", "1")  # which has the right file after a first installation
    right = wheel(index, "needed", "1.0", "value = 'of a stranger'")
    refused(set_up(checkout, python=plain_python), "pip could not install")
    assert "Hash mismatch for `needed==1.0`" in (checkout / ".venv" / "setup.log").read_text()
    assert not {"needed", "torch"} & installed(checkout)
    assert right != wheel(index, "needed", "1.0")
    done = set_up(checkout, python=plain_python)
    assert done.returncode == 0 and len(pip_calls(checkout)) == 2, done.stdout + done.stderr


def test_two_set_ups_at_once_make_one_environment(checkout: Path, index: Path, plain_python: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: set_up(checkout, python=plain_python), range(2)))
    assert [done.returncode for done in both] == [0, 0], both
    assert sum("installing" in done.stdout for done in both) == 1, both
    assert sum("is up to date" in done.stdout for done in both) == 1, both


def test_the_tests_also_have_the_oldest_supported_transformers(
    setup_module: ModuleType, checkout: Path, index: Path, plain_python: str
) -> None:
    old = checkout / setup_module.OLD_LOCK.relative_to(ROOT)
    old.parent.mkdir()
    old.write_text(wheel(index, "transformers", "0.9"))
    pyproject = re.sub(r"(?ms)^test = \[.*?^\]", "test = []", (checkout / "pyproject.toml").read_text())
    (checkout / "pyproject.toml").write_text(pyproject)
    done = set_up(checkout, python=plain_python, extra="--extra test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (checkout / ".venv" / "transformers-4.57" / "transformers.py").is_file()
    assert marker(checkout)["extras"] == ["test"]

    lock, extras = setup_module.read_lock(setup_module.OLD_LOCK.read_text()), (ROOT / "pyproject.toml").read_text()
    assert 'hf = ["transformers>=4.57"]' in extras and lock["transformers"].pin.startswith("transformers==4.57.")
    assert all(locked.hashes for locked in lock.values())


# ---------------------------------------------------------------- the whole, as quickstart.sh calls it


def test_a_vendor_torch_is_used_and_the_second_run_does_nothing(checkout: Path, tmp_path: Path) -> None:
    """The tests' interpreter has everything but this torch, so pip has nothing to download."""
    vendor = fake_torch(tmp_path / "vendor", VENDOR)
    first = set_up(checkout, python_path=vendor)
    assert first.returncode == 0, first.stdout + first.stderr
    assert f"torch {VENDOR} in {vendor}/torch is installed and is used" in first.stdout
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


def test_kernels_are_compiled_beside_the_installation(checkout: Path, index: Path, plain_python: str) -> None:
    """While pip is at work, a build runs; it ends with an installation that fails."""
    (checkout / "csrc").mkdir()
    (checkout / "csrc" / "build.py").write_text(BUILD)
    started, stopped = checkout / "csrc" / "started", checkout / "csrc" / "stopped"
    (index / "needed-1.0-py3-none-any.whl").unlink()
    refused(set_up(checkout, python=plain_python), "pip could not install")
    assert started.read_text() == "yes"
    while not stopped.exists():  # a build that goes on is a test that hangs, which pytest ends with its name
        time.sleep(0.01)


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
    for expected in ("is installed and is used", "is up to date"):
        done = set_up(checkout, python_path=vendor)
        assert done.returncode == 0 and expected in done.stdout, done.stdout + done.stderr
    assert (theirs / "precious").exists() and not marker(checkout)["made_here"]

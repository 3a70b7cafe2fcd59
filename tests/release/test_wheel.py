"""The wheel in an empty environment without a compiler: native kernels, commands, and NVIDIA's packages beside it.

NVIDIA_WHEELS names a folder of wheels of megatron-core and megatron-bridge. Stand-ins are used without it.

    pip download --no-deps megatron-core megatron-bridge -d wheels && NVIDIA_WHEELS=wheels pytest tests/release
"""

from __future__ import annotations

import csv
import os
import re
import tomllib
import zipfile
from pathlib import Path

import pytest

from megatron.commands import TOOLS, script
from tests.helpers.installed import STEP, Environment, build, copy_sources, write_wheel
from tests.policy.rules import ROOT

ORDERS = ("ours first", "NVIDIA's first")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(sources, "build_wheel", tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def editable(wheel: Path, sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(sources, "build_editable", tmp_path_factory.mktemp("editable"))


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    if "NVIDIA_WHEELS" in os.environ:
        found = sorted(Path(os.environ["NVIDIA_WHEELS"]).glob("megatron_*.whl"))
        assert len(found) == 2, found
        return [path.resolve() for path in found]
    folder = tmp_path_factory.mktemp("nvidia")
    parts = (("megatron_core", "core"), ("megatron_bridge", "bridge"))
    return [write_wheel(folder, name, {f"megatron/{part}/__init__.py": ""}) for name, part in parts]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment.create(tmp_path_factory.mktemp("installed"))
    environment.install(wheel)
    return environment


# ---------------------------------------------------------------- the wheel alone


def test_the_wheel_is_for_every_python(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert re.fullmatch(r"megatron_anywhere-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)
    assert {"megatron/ops/_kernels.so", "megatron/data/_helpers.so", "megatron/py.typed"} <= set(names)
    assert not [name for name in names if name.startswith(("csrc/", "tests/", "tools/", "build/"))]


def test_a_step_runs_on_native_kernels_without_a_compiler(installed: Environment, tmp_path: Path) -> None:
    done = installed.run("megatron-train", *STEP, "--kernels", "native", cwd=tmp_path)
    assert done.returncode == 0 and "\nkernels: native" in done.stdout, done.stdout + done.stderr
    assert "stopped at iteration 1: all iterations are done" in done.stdout, done.stdout
    code = "from megatron.data.index_builders import Builders; print(Builders.resolve().reason)"
    assert installed.python(code, tmp_path) == "c++"


def test_messages_name_the_installed_commands(installed: Environment, tmp_path: Path) -> None:
    done = installed.run("megatron-train", *STEP[:-5], cwd=tmp_path)
    assert done.returncode == 2 and "megatron-preprocess" in done.stderr and "tools/" not in done.stderr, done.stderr
    for command in (("megatron-convert",), ("python", "-m", "megatron.cli.generate")):
        done = installed.run(*command, "--help", cwd=tmp_path)
        assert done.returncode == 0 and re.search("(usage: |More:\n  )megatron-", done.stdout), (
            done.stdout + done.stderr
        )
        assert "tools/" not in done.stdout and "pretrain_gpt" not in done.stdout


def test_the_first_line_without_kernels_builds_them(wheel: Path, tmp_path: Path) -> None:
    environment = Environment.create(tmp_path / "environment")
    environment.install(wheel)
    environment.site_packages.joinpath("megatron", "ops", "_kernels.so").unlink()
    done = environment.run("megatron-train", *STEP, cwd=tmp_path)
    assert done.stdout.startswith("native kernels are not built; build them: pip install "), done.stdout + done.stderr


def test_every_tool_is_a_command() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    expected = {script(tool): f"megatron_anywhere:{tool}" for tool in TOOLS}
    assert expected.items() <= scripts.items() and scripts["megatron-train"] == "megatron_anywhere:train"
    assert all((ROOT / "tools" / f"{tool}.py").is_file() for tool in TOOLS)


# ---------------------------------------------------------------- beside NVIDIA's packages


@pytest.fixture(scope="module", params=[(kind, order) for kind in ("plain", "editable") for order in ORDERS], ids=str)
def both(
    request: pytest.FixtureRequest,
    wheel: Path,
    editable: Path,
    nvidia: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Environment:
    kind, order = request.param
    ours = [wheel if kind == "plain" else editable]
    environment = Environment.create(tmp_path_factory.mktemp("both"))
    for path in [*ours, *nvidia] if order == ORDERS[0] else [*nvidia, *ours]:
        environment.install(path)
    return environment


def origin(environment: Environment, part: str, cwd: Path) -> Path:
    code = f"import importlib.util as u; print(u.find_spec('megatron.{part}').origin)"
    return Path(environment.python(code, cwd))


def test_both_are_found_and_no_file_has_two_owners(both: Environment, sources: Path, tmp_path: Path) -> None:
    for part in ("core", "bridge"):
        assert origin(both, part, sources) == both.site_packages / "megatron" / part / "__init__.py"
    assert origin(both, "training", tmp_path).name == "__init__.py"
    assert both.run("python", "-m", "megatron.cli.train", "--help", cwd=sources).returncode == 0
    assert both.run("megatron-train", "--help", cwd=tmp_path).returncode == 0
    owners = [set(files_of(record)) for record in both.site_packages.glob("megatron_*.dist-info/RECORD")]
    assert len(owners) == 3 and sum(map(len, owners)) == len(set.union(*owners))


def files_of(record: Path) -> list[str]:
    return [row[0] for row in csv.reader(record.read_text().splitlines())]


def test_a_folder_with_parts_of_its_own_keeps_them(both: Environment, tmp_path: Path) -> None:
    for part in ("core", "training"):
        (tmp_path / "megatron" / part).mkdir(parents=True)
        (tmp_path / "megatron" / part / "__init__.py").touch()
        assert origin(both, part, tmp_path) == tmp_path / "megatron" / part / "__init__.py"
    done = both.run("python", "-m", "megatron.cli.train", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"error: megatron.training: Python finds it in {tmp_path}/megatron/training, and")
    assert f"start in a folder other than {tmp_path}" in done.stderr
    torchrun = ("python", "-m", "torch.distributed.run", "--nproc_per_node", "1")
    launched = both.run(*torchrun, "-m", "megatron.cli.train", cwd=tmp_path)
    assert launched.returncode and done.stderr.strip() in launched.stderr and "exitcode  : 2" in launched.stderr


@pytest.mark.parametrize("gone", ["ours", "NVIDIA's"])
def test_uninstalling_one_leaves_the_other(gone: str, wheel: Path, nvidia: list[Path], tmp_path: Path) -> None:
    environment = Environment.create(tmp_path / "environment")
    for path in (wheel, *nvidia):
        environment.install(path)
    names = ["megatron-anywhere"] if gone == "ours" else ["megatron-core", "megatron-bridge"]
    environment.pip("uninstall", "--yes", *names)
    if gone == "ours":
        assert origin(environment, "core", tmp_path).is_file() and origin(environment, "bridge", tmp_path).is_file()
        assert environment.run("python", "-c", "import megatron.training", cwd=tmp_path).returncode
    else:
        assert environment.run("megatron-train", "--help", cwd=tmp_path).returncode == 0
        assert environment.run("python", "-c", "import megatron.core", cwd=tmp_path).returncode

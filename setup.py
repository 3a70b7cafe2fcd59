"""Builds what is written in C++, ahead of time. Without a compiler the package works all the same."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py


def load_builder() -> ModuleType:
    """Loads csrc/build.py, which stays outside of the package: nothing that runs later may compile."""
    spec = importlib.util.spec_from_file_location("build_kernels", Path(__file__).parent / "csrc" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


BUILDER = load_builder()


class WithConfigs(build_py):
    """Puts configs/ of the checkout beside the packages, where --config NAME finds them once installed."""

    def run(self) -> None:
        super().run()
        for file in self._configs():
            self.copy_file(str(file), str(self._target(file)))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *(str(self._target(file)) for file in self._configs())]

    def _configs(self) -> list[Path]:
        return [] if self.editable_mode else sorted(Path("configs").glob("*.yaml"))

    def _target(self, file: Path) -> Path:
        target = Path(self.build_lib, "megatron", "configs", file.name)
        self.mkpath(str(target.parent))
        return target


class BuildIfPossible(build_ext):
    """Prints a line about each library that was not built, instead of a failed installation."""

    def run(self) -> None:
        print("\n".join(BUILDER.build_into(self._root())))

    def get_outputs(self) -> list[str]:
        """Returns only what was built: an installer would look in vain for the rest."""
        kernels, helpers = (self._root() / name for name in (BUILDER.KERNELS, BUILDER.HELPERS))
        return [str(path) for path in (kernels, kernels.with_suffix(".json"), helpers) if path.exists()]

    def _root(self) -> Path:
        return Path(__file__).parent if self.inplace else Path(self.build_lib)


class WithLibraries(Distribution):
    """Gives the wheel a platform: setuptools knows of no libraries but extensions of Python."""

    def has_ext_modules(self) -> bool:
        return True


class AnyPythonWheel(bdist_wheel):
    """Tags the wheel for every Python 3: the libraries depend on the platform alone."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    distclass=WithLibraries,
    cmdclass={"build_ext": BuildIfPossible, "build_py": WithConfigs, "bdist_wheel": AnyPythonWheel},
)

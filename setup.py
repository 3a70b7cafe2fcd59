"""Builds what is written in C++, ahead of time. Without a compiler or pybind11 the package works all the same."""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

NAME = "megatron.data._helpers"
KERNELS = Path("megatron", "ops", "_kernels.so")


def kernel_builder() -> ModuleType:
    """csrc/build.py, which is no part of the package: nothing that runs later may compile."""
    spec = importlib.util.spec_from_file_location("build_kernels", Path(__file__).parent / "csrc" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


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
    """One line about what was not built, instead of a failed installation."""

    def run(self) -> None:
        builder = kernel_builder()
        with ThreadPoolExecutor(1) as beside:  # the helpers take one core
            kernels = beside.submit(builder.build, self._folder() / KERNELS)
            super().run()
        try:
            print(builder.summary(kernels.result()))
        except (builder.BuildError, OSError) as error:  # a full disk is no reason either to have no package
            print(f"kernels: not built ({error}); PyTorch's own operations are used, which are slower")

    def build_extension(self, ext: Extension) -> None:
        try:
            import pybind11
        except ImportError:
            print(f"{ext.name}: not built (no pybind11); the numpy twin is used, which is slower")
            return
        ext.include_dirs.append(pybind11.get_include())
        if self.compiler.compiler_type == "msvc":
            ext.extra_compile_args = ["/std:c++17", "/O2"]
        else:
            # No -march: one build runs on every machine of its kind. No fused multiply-add: numpy has none either.
            ext.extra_compile_args = ["-std=c++17", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall"]
            ext.extra_compile_args.append("-pthread")
            ext.extra_link_args = ["-pthread"]
        try:
            super().build_extension(ext)
        except Exception as error:  # whatever a compiler that is missing or broken may raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            print(f"{ext.name}: not built ({reason}); the numpy twin is used, which is slower")

    def copy_extensions_to_source(self) -> None:
        built = [ext for ext in self.extensions if self._was_built(ext)]
        self.extensions, everything = built, self.extensions
        super().copy_extensions_to_source()
        self.extensions = everything

    def _was_built(self, ext: Extension) -> bool:
        return Path(self.build_lib, self.get_ext_filename(self.get_ext_fullname(ext.name))).exists()

    def get_outputs(self) -> list[str]:
        """Only what is there: an installer would look in vain for the rest."""
        kernels = self._folder() / KERNELS
        built = [*super().get_outputs(), str(kernels), str(kernels.with_suffix(".json"))]
        return [path for path in built if Path(path).exists()]

    def _folder(self) -> Path:
        return Path(__file__).parent if self.inplace else Path(self.build_lib)


setup(
    ext_modules=[Extension(NAME, ["csrc/data/helpers.cpp"], language="c++")],
    cmdclass={"build_ext": BuildIfPossible, "build_py": WithConfigs},
)

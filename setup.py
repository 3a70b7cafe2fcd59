"""Builds what is written in C++, ahead of time. Without a compiler or pybind11 the package works all the same."""

from __future__ import annotations

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NAME = "megatron.data._helpers"


class BuildIfPossible(build_ext):
    """One line about what was not built, instead of a failed installation."""

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
        from pathlib import Path

        return Path(self.build_lib, self.get_ext_filename(self.get_ext_fullname(ext.name))).exists()

    def get_outputs(self) -> list[str]:
        """Only what is there: an installer would look in vain for the rest."""
        from pathlib import Path

        return [path for path in super().get_outputs() if Path(path).exists()]


setup(
    ext_modules=[Extension(NAME, ["csrc/data/helpers.cpp"], language="c++")],
    cmdclass={"build_ext": BuildIfPossible},
)

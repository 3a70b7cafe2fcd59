"""Kernels with a planted mistake: the comparison that the real ones pass must fail.

To save time only the operation's file is compiled, without optimisation and with precompiled standard headers.
Everything else is linked from the existing build.
"""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import re
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.ops.proof import Draw, compare_call
from megatron.ops.registry import register
from tests.helpers.declared import all_proofs, files_with
from tests.helpers.kernels import builder
from tests.policy.rules import ROOT

# What torch imports at the first call that poisons memory, and at the first gradient: more than a second.
PREPARED = ("torch._inductor", "torch.fx.experimental.symbolic_shapes")
UNOPTIMISED = ("-O0", "-g0")
# Of the emulated build's sanitizers the planted bugs need this one; each makes the compiler slower.
ALIGNMENT_ALONE = ("-fno-sanitize=all", "-fsanitize=alignment")
TIERS = ("none", "base", "v3", "v4", "v4_bf16")  # csrc/common/tiers.h


@dataclass(frozen=True)
class Mistake:
    """A text of csrc/ and its replacement. CUDA runs in the emulator, and so does code shared by CPU and GPU."""

    file: str
    old: str
    new: str
    op: str
    seen: str = ""  # in what the comparison says, which says something
    on_cpu: bool | None = None  # None: as the file's name says

    @property
    def emulated(self) -> bool:
        return not (Path(self.file).name.startswith("cpu") if self.on_cpu is None else self.on_cpu)

    def must_be_seen(self, folder: Path) -> None:
        """Asserts that the comparison, which the real kernels pass, fails."""
        root = planted_checkout(folder, self.file, self.old, self.new)
        sources = all_proofs()[self.op].folder
        kernels = planted_library(root, Path(self.file), sources, emulated=self.emulated)
        said = what_the_comparison_says(kernels, self.op, self.emulated)
        assert said and self.seen in said, said or "nothing is found"


def planted_checkout(folder: Path, file: str, old: str, new: str, occurrence: int = 0) -> Path:
    """csrc/ with one text replaced."""
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    text = (folder / "csrc" / file).read_text()
    parts = text.split(old)
    assert len(parts) > occurrence + 1, f"{file} no longer has {old!r}"
    before, after = old.join(parts[: occurrence + 1]), old.join(parts[occurrence + 1 :])
    (folder / "csrc" / file).write_text(before + new + after)
    return folder


@cache
def as_built(emulated: bool) -> tuple[Any, tuple[Path, ...]]:
    """Recipe and objects of the real kernels; the objects exist where the kernels are built."""
    build = builder()
    try:
        cuda = None if emulated else build.find_cuda()
    except build.CudaError:
        cuda = None
    try:
        recipe = build.recipe(build.compiler(), cuda, emulated=emulated)
    except build.BuildError as error:
        pytest.skip(f"no kernels with mistakes: {error}")
    with build.alone(build.CACHE, build.LOCK_SECONDS):
        return recipe, tuple(build.compile_all(recipe.units, recipe.compilers, build.CACHE))


def kernel_sources(folder: str, *, emulated: bool) -> list[Path]:
    return sorted((ROOT / "csrc").glob(f"{folder}/cuda*.cu" if emulated else f"{folder}/cpu*.cpp"))


def planted_library(root: Path, file: Path, folder: str, *, emulated: bool) -> Path:
    """Kernels with the planted `file`: recompiles that source, or for a header all kernels of `folder`."""
    sources = kernel_sources(folder, emulated=emulated)
    if file.suffix != ".h":
        assert ROOT / "csrc" / file in sources, f"{file} is no source of {folder}"
        sources = [ROOT / "csrc" / file]
    flags = (*UNOPTIMISED, *(ALIGNMENT_ALONE if emulated else ()))
    return made_anew(root, root, sources, emulated=emulated, flags=flags)


def made_anew(
    folder: Path,
    root: Path,
    sources: Sequence[Path],
    *,
    emulated: bool,
    flags: Sequence[str],
    at_link: Sequence[str] = (),
) -> Path:
    """Compiles these sources of the checkout `root` with additional flags into `folder`."""
    recipe, objects = as_built(emulated)
    ours = {}  # of every source, the one for the best of the instruction sets that this machine has
    for at, unit in enumerate(recipe.units):
        runs_here = emulated or any(f"-DMK_TIER={tier}" in unit.command for tier in TIERS[: best_tier() + 1])
        if unit.source in sources and runs_here:
            ours[unit.source] = at
    assert len(ours) == len(sources)
    anew, commands = list(objects), []
    for source, at in ours.items():
        anew[at] = folder / f"{source.parent.name}-{source.stem}.o"
        changed = root / source.relative_to(ROOT)
        command = (*recipe.units[at].command, *flags)
        commands.append((*command, *headers_ahead(command), "-c", str(changed), "-o", str(anew[at])))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(builder().run, commands))
    builder().link_to_torch(recipe.cxx, anew, folder / "_kernels.so", (*recipe.link_flags, *at_link))
    return folder / "_kernels.so"


@cache
def headers_ahead(command: tuple[str, ...]) -> tuple[str, ...]:
    """Flags that give this compiler command precompiled standard headers, which save half of its work. The first test
    process that asks compiles them for all."""
    build = builder()
    recipe, _ = as_built("-DMK_EMULATED" in command)
    key = hashlib.sha256("\0".join((recipe.compilers, *command, standard_headers())).encode()).hexdigest()[:24]
    header = build.CACHE / f"headers-{key}" / "standard.h"
    with build.alone(build.CACHE, build.LOCK_SECONDS):
        if not header.exists():
            header.parent.mkdir(exist_ok=True)
            source = header.with_name("as_text.h")
            source.write_text(standard_headers())
            build.run((*command, "-x", "c++-header", "-c", str(source), "-o", f"{header}.gch"))
            source.replace(header)
    return ("-include", str(header))


@cache
def standard_headers() -> str:
    """A header that includes all that the kernels include of the C++ library, and the vector instructions."""
    texts = [path.read_text() for path in builder().sources() if path.stem not in ("torch", "binding", "stable")]
    names = {name for text in texts for name in re.findall(r"^#include <([a-z]+)>$", text, re.M)}
    intrinsics = "#if defined(__x86_64__)\n#include <immintrin.h>\n#endif\n"
    return "".join(f"#include <{name}>\n" for name in sorted(names)) + intrinsics


@cache
def best_tier() -> int:
    return int(ctypes.CDLL(str(builder().OUTPUT)).mk_cpu_tier())


def what_the_comparison_says(kernels: Path, op: str, emulated: bool) -> str:
    """Error text, empty if the comparison passes. Runs in a forked process, which a kernel may crash; the fork has all
    imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.planted", *PREPARED, *files_with("CPU_PROOFS")])
    said = kernels.with_suffix(".said")
    process = context.Process(target=compare, args=(kernels, op, emulated, said))
    process.start()
    process.join()
    return said.read_text() if process.exitcode else ""


def compare(kernels: Path, op: str, emulated: bool, said: Path) -> None:
    with said.open("w") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    namespace = "megatron_emulated" if emulated else "megatron_native"
    torch.ops.load_library(kernels)
    register(namespace)
    proof = all_proofs()[op]
    for dtype in proof.dtypes[:2]:
        for call in proof.calls(Draw(dtype, torch.Generator().manual_seed(1))):
            for finding in compare_call(proof, call, getattr(torch.ops, namespace), "cpu"):
                if finding.wrong:
                    sys.exit(f"{call.name}: {finding.tensor}: {finding.wrong}")

"""Builds of the kernels for tests only: with AddressSanitizer, and without the highest instruction sets.

AddressSanitizer finds a read or write beyond a tensor or beyond shared memory, even if every result stays right.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.kernels import builder
from tests.helpers.planted import TIERS, as_built, best_tier, kernel_sources, made_anew, planted_checkout
from tests.helpers.warm import warm_python
from tests.policy.rules import ROOT

# Compares what has few enough numbers: on the emulator's stacks the sanitizer makes every switch slow.
COMPARE = """
import sys
import torch
from megatron.ops.proof import PROOFS, Draw, compare_call, flat_tensors
from megatron.ops.registry import register
from tests.helpers.declared import all_proofs
path, namespace, most, *names = sys.argv[1:]
torch.ops.load_library(path)
register(namespace)
emulated = namespace == "megatron_emulated"
proofs = PROOFS if emulated else all_proofs()
for name in names or proofs:
    for dtype in proofs[name].dtypes[1 if emulated else 0 : 2]:
        calls = list(proofs[name].calls(Draw(dtype, torch.Generator().manual_seed(1))))
        sizes = [sum(tensor.numel() for tensor in flat_tensors(list(call.args))) for call in calls]
        for call, size in zip(calls, sizes):
            if size <= max(int(most), min(size for size in sizes if size > 0)):
                for finding in compare_call(proofs[name], call, getattr(torch.ops, namespace), "cpu"):
                    assert not finding.wrong, f"{name}: {call.name}: {finding.tensor}: {finding.wrong}"
print("right")
"""
MOST = {"cpu": 100_000, "emulated": 250}
NAMESPACE = {"cpu": "megatron_native", "emulated": "megatron_emulated"}
# The emulator's fibers have their own stacks; every other emulator test checks undefined behaviour.
ASAN = ("-O0", "-g1", "-fno-sanitize=undefined", "-fsanitize=address", "--param", "asan-stack=0")


def comparison(kernels: Path, name: str, *ops: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [warm_python(), "-c", COMPARE, str(kernels), NAMESPACE[name], str(MOST[name]), *ops]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=900, check=False
    )


def with_sanitizer(
    folder: Path, root: Path, name: str, sources: list[Path], *ops: str
) -> subprocess.CompletedProcess[str]:
    try:
        command = [*builder().compiler(), "-print-file-name=libasan.so"]
    except builder().BuildError as error:
        pytest.skip(f"no kernels with AddressSanitizer: {error}")
    runtime = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip(f"{command[0]} has no libasan.so")
    kernels = made_anew(folder, root, sources, emulated=name == "emulated", flags=ASAN, at_link=("-fsanitize=address",))
    options = "detect_leaks=0:detect_odr_violation=0"  # torch's
    return comparison(kernels, name, *ops, LD_PRELOAD=runtime, ASAN_OPTIONS=options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "emulated"])
def test_no_kernel_leaves_its_memory(tmp_path: Path, name: str) -> None:
    done = with_sanitizer(tmp_path, ROOT, name, kernel_sources("*", emulated=name == "emulated"))
    assert done.stdout == "right\n" and done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("name", "file", "old", "new", "op"),
    [
        ("cpu", "norm/cpu.cpp", "for_lanes(width, [=]", "for_lanes(width + 1, [=]", "add_rms_norm"),
        (
            "emulated",
            "rope/cuda.cu",
            "load_step(x, first);",
            "load_step(x, first), first[0] += 0.0f * load(x[-1]);",
            "rope",
        ),
    ],
)
def test_a_planted_step_beyond_the_end_is_seen(
    tmp_path: Path, name: str, file: str, old: str, new: str, op: str
) -> None:
    root = planted_checkout(tmp_path, file, old, new)
    done = with_sanitizer(tmp_path, root, name, [ROOT / "csrc" / file], op)
    assert done.returncode and "heap-buffer-overflow" in done.stderr, done.stderr[-3000:]


# name -> (tiers that it replaces, the best first; its own tier)
LOWER = {"AVX2": (("v4_bf16", "v4"), "v3"), "AVX-512 without bf16": (("v4_bf16",), "v4")}


def linked_with(tier: str, instead_of: tuple[str, ...], output: Path) -> Path:
    """Links the objects that users have, without those of higher tiers: calls of these go to `tier`."""
    recipe, objects = as_built(emulated=False)
    kept, calls = [], []
    for unit, compiled in zip(recipe.units, objects, strict=True):
        higher = [name for name in instead_of if f"-DMK_TIER={name}" in unit.command]
        if not higher:
            kept.append(compiled)
            continue
        listed = subprocess.run(
            ["nm", "-g", "--defined-only", str(compiled)], capture_output=True, text=True, check=True
        )
        for symbol in re.findall(r" T (\S+)$", listed.stdout, re.M):
            calls.append(f"-Wl,--defsym={symbol}={symbol.replace(mangled(higher[0]), mangled(tier), 1)}")
    assert len(kept) < len(objects) and calls
    builder().link_to_torch(recipe.cxx, kept, output, (*recipe.link_flags, *calls))
    return output


def mangled(tier: str) -> str:
    return f"_ZN2mk3cpu{len(tier)}{tier}"


@pytest.mark.parametrize("name", LOWER)
def test_lower_instruction_sets_are_right_too(tmp_path: Path, name: str) -> None:
    """A machine with AVX-512 never executes the code that most others use."""
    higher, tier = LOWER[name]
    if best_tier() < TIERS.index(higher[-1]):
        pytest.skip("this machine runs the lower instruction set itself")
    done = comparison(linked_with(tier, higher, tmp_path / "_kernels.so"), "cpu")
    assert done.stdout == "right\n", done.stderr[-3000:]

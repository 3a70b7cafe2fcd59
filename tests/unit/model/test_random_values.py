"""Random values by index: the bits of Philox, the distributions, and slices that equal the whole."""

from __future__ import annotations

import hashlib
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pytest
import torch
from numpy._core import _multiarray_umath as umath

from megatron.model.random_values import normal_values, uniform_values, words_of
from megatron.ops.library import c_library, library
from tests.helpers.planted import as_built

MILLION = 1 << 20


class Values(Protocol):
    __name__: str

    def __call__(
        self, seed: int, name: str, runs: Sequence[tuple[int, int]], scale: float, /, *, in_numpy: bool = False
    ) -> torch.Tensor: ...


@pytest.fixture(params=["numpy", "compiled"])
def in_numpy(request: pytest.FixtureRequest) -> bool:
    """Runs a test with the compiled function and with its numpy twin."""
    if request.param == "compiled" and c_library() is None:
        pytest.skip(f"the native kernels are {library().missing}")
    return bool(request.param == "numpy")


# ---------------------------------------------------------------- the bits


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x64-10 as in its paper (Salmon et al., 2011), in Python integers."""
    mask, c, k = (1 << 64) - 1, list(counter), list(key)
    for _ in range(10):
        a, b = c[0] * 0xD2E7470EE14C6C93, c[2] * 0xCA5A826395121157
        c = [(b >> 64) ^ c[1] ^ k[0], b & mask, (a >> 64) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return c


def test_our_philox_gives_the_published_answers() -> None:
    """Known answers of Random123, the authors' own library."""
    ones = (1 << 64) - 1
    assert philox([0] * 4, [0] * 2) == [
        0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B,
    ]  # fmt: skip
    assert philox([ones] * 4, [ones] * 2) == [
        0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0,
    ]  # fmt: skip


def test_words_are_those_of_philox() -> None:
    """Word i is one of the four of counter i // 4 + 1: numpy increments the counter before it computes."""
    digest = hashlib.sha256(b"7:layers.0.mlp.weight").digest()
    key = [int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")]
    runs = [(0, 9), (9, 1), (10, 3), (14, 2), (4 * 10**12 + 3, 9), (6, 4), (8, 0), (8, 3), (12, 1)]
    for (start, count), words in zip(runs, words_of(7, "layers.0.mlp.weight", runs), strict=True):
        expected = [philox([i // 4 + 1, 0, 0, 0], key)[i % 4] for i in range(start, start + count)]
        assert [int(word) for word in words] == expected, start


# ---------------------------------------------------------------- the values


def test_normal_values_are_those_of_box_and_muller() -> None:
    values = normal_values(3, "x", [(0, 4000)], 0.5)
    for pair, word in enumerate(map(int, next(words_of(3, "x", [(0, 2000)])))):
        distance = math.sqrt(-2 * math.log(((word & 0xFFFFFFFF) + 0.5) / 2**32))
        angle = math.pi / 2 * ((word >> 32 & (1 << 30) - 1) + 0.5) / 2**30
        signs = [1 - 2 * (word >> 63), 1 - 2 * (word >> 62 & 1)]
        expected = [0.5 * distance * f(angle) * sign for f, sign in zip((math.cos, math.sin), signs)]
        assert values[2 * pair : 2 * pair + 2].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_uniform_values_are_the_halves_of_the_words() -> None:
    values = uniform_values(3, "x", [(0, 400)], 0.25)
    for pair, word in enumerate(map(int, next(words_of(3, "x", [(0, 200)])))):
        expected = [0.25 * ((half + 0.5) / 2**31 - 1) for half in (word & 0xFFFFFFFF, word >> 32)]
        assert values[2 * pair : 2 * pair + 2].tolist() == pytest.approx(expected, rel=1e-6)


def furthest_from(values: torch.Tensor, distribution: torch.Tensor) -> float:
    """Kolmogorov-Smirnov distance times the root of the number of values; above 1.95 in one case of 1000."""
    steps = torch.arange(len(values) + 1, dtype=torch.float64) / len(values)
    apart = torch.maximum(steps[1:] - distribution, distribution - steps[:-1])
    return apart.max().item() * math.sqrt(len(values))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_distributions(seed: int) -> None:
    normal = normal_values(seed, "n", [(0, MILLION)], 1.0).double()
    assert furthest_from(normal.sort().values, torch.special.ndtr(normal.sort().values)) < 1.95
    uniform = uniform_values(seed, "u", [(0, MILLION)], 1.0).double()
    assert furthest_from(uniform.sort().values, (uniform.sort().values + 1) / 2) < 1.95
    assert uniform.abs().max() <= 1.0
    for power, mean, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)]:
        assert abs(normal.pow(power).mean() - mean) < 4 * math.sqrt(variance / MILLION), power
    pairs = normal.view(-1, 2)
    for one, other in [(pairs[:, 0], pairs[:, 1]), (normal[:-2], normal[2:]), (normal[:-8], normal[8:])]:
        for f, variance in [(lambda x: x, 1), (lambda x: x * x - 1, 4)]:
            assert abs((f(one) * f(other)).mean()) < 4 * math.sqrt(variance / len(one))


def test_the_distance_sees_what_is_not_normal() -> None:
    normal = normal_values(1, "n", [(0, MILLION)], 1.0).double().sort().values
    for wrong in (normal * 1.01, normal + 0.01, normal.clamp(-2, 2), normal.round(decimals=1)):
        assert furthest_from(wrong, torch.special.ndtr(wrong)) > 2.5


# ---------------------------------------------------------------- the compiled function


def random_runs(draw: random.Random) -> list[tuple[int, int]]:
    """Odd starts, empty runs, runs within a counter and across many, far offsets."""
    far = draw.choice([0, draw.randrange(1 << 20), draw.randrange(1 << 48)])
    lengths = [draw.choice([0, 1, 2, 3, 7, 8, 9, draw.randrange(2000), draw.randrange(70_000)]) for _ in range(12)]
    return [(far + draw.randrange(100_000), length) for length in lengths[: draw.randrange(13)]]


def differences(seed: int, cases: int) -> Iterator[str]:
    """Cases in which a bit of the compiled function and of numpy differs."""
    draw = random.Random(seed)
    for case in range(cases):
        values: Values = draw.choice([normal_values, uniform_values])
        name, scale = str(draw.random()), 10 ** draw.uniform(-9, 3)
        runs = random_runs(draw)
        bits = [values(seed, name, runs, scale, in_numpy=way).view(torch.int32) for way in (False, True)]
        if not torch.equal(*bits):
            yield f"case {case}: {values.__name__}, {runs}, {scale}"


def test_the_compiled_function_gives_numpys_bits() -> None:
    if c_library() is None:
        pytest.skip(f"the native kernels are {library().missing}")
    assert not list(differences(20261126, 40))


# ---------------------------------------------------------------- by index


@pytest.mark.parametrize("values", [normal_values, uniform_values])
def test_a_run_is_its_part_of_the_whole(values: Values, in_numpy: bool) -> None:
    whole = values(5, "x", [(0, 200_000)], 0.02, in_numpy=in_numpy)
    for runs in (
        [(0, 1)], [(7, 1)], [(1, 2)], [(99_999, 100_001)], [(40_000, 65_537), (3, 4)],
        [(start, 5) for start in range(0, 200_000, 12)], [(9, 0)], [],
    ):  # fmt: skip
        expected = torch.cat([whole[start : start + count] for start, count in runs]) if runs else torch.empty(0)
        assert torch.equal(values(5, "x", runs, 0.02, in_numpy=in_numpy), expected), runs[:3]


def test_the_number_of_threads_does_not_matter(in_numpy: bool) -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(normal_values(5, "x", [(11, 300_001)], 0.02, in_numpy=in_numpy))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


GOLDEN = {normal_values: "0b7d2139485e118dfdeaf171c43c779e", uniform_values: "a3e6a896a57b69575dc16e9a51797309"}


def digest_of(values: Values, *, in_numpy: bool) -> str:
    drawn = values(1234, "golden", [(0, MILLION)], 0.02, in_numpy=in_numpy)
    assert drawn.dtype == torch.float32
    return hashlib.sha256(drawn.numpy().astype("<f4").tobytes()).hexdigest()[:32]


@pytest.mark.parametrize("values", GOLDEN)
def test_the_bits_never_change(values: Values, in_numpy: bool) -> None:
    """Golden to the last bit of a million values: on every processor, with every numpy and torch."""
    assert digest_of(values, in_numpy=in_numpy) == GOLDEN[values]


def test_a_processor_with_fewer_instructions_draws_the_same_bits() -> None:
    """numpy dispatches by processor; includes one without wide vectors and fused multiply-add."""
    dispatched = [name for name in umath.__cpu_dispatch__ if umath.__cpu_features__.get(name)]
    if not dispatched:
        pytest.skip("numpy has no instructions to choose from on this processor")
    code = (
        "from tests.unit.model import test_random_values as t\n"
        "from numpy._core import _multiarray_umath as umath\n"
        f"assert not any(umath.__cpu_features__[name] for name in {dispatched})\n"
        "assert [t.digest_of(values, in_numpy=True) for values in t.GOLDEN] == list(t.GOLDEN.values())\n"
    )
    environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(dispatched)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_compiled_function_fuses_nothing() -> None:
    """A fused multiply-add changes one fp32 value in about 10^9, too rarely for a comparison of values."""
    recipe, objects = as_built(emulated=False)
    disassembler = shutil.which("objdump")
    if disassembler is None:
        pytest.skip("no objdump on the PATH")
    fused: dict[str, list[int]] = {}
    for unit, path in zip(recipe.units, objects, strict=True):
        folder = unit.source.parent.name
        if unit.source.name == "cpu.cpp" and folder in ("random", "softmax"):
            code = subprocess.run([disassembler, "-d", path], capture_output=True, text=True, check=True).stdout
            assert "random_values" in code or folder != "random"
            fused.setdefault(folder, []).append(len(re.findall(r"\tv?fn?m(?:add|sub)", code)))
    assert fused["random"] and not any(fused["random"]), fused
    assert any(fused["softmax"]), "the search no longer finds fused instructions"

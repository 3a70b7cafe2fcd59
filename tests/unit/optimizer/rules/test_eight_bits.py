"""8-bit blocks: their errors, a numpy twin, repeated storage, and training beside AdamW."""

from __future__ import annotations

from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.config.sections.precision import PrecisionConfig
from megatron.data_parallel import BucketStore
from megatron.distributed.parallel_state import Axis
from megatron.optimizer import Optimizer
from megatron.optimizer.rules import eight_bits
from megatron.optimizer.rules.choose import uncut_dim
from megatron.optimizer.rules.eight_bits import NEAREST, Blocks, Section, dequantise, dither, quantise
from megatron.state.shard import Shard

SHAPES = [(1, 1), (3, 256), (300, 520), (257, 5), (1, 700)]


def values(shape: tuple[int, int], *, signed: bool) -> Tensor:
    """Values of many magnitudes, with zeros and a block of zeros."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    made = made * torch.exp(3 * torch.randn(shape, generator=torch.Generator().manual_seed(4)))
    made[0] = 0.0
    made.view(-1)[::11] = 0.0
    return made if signed else made.square()


def numbers_of_codes(*, signed: bool) -> np.ndarray:
    """Values of all codes by definition: (1 + m / 8) 2**e, relative to the largest, 1."""
    count = 127 if signed else 255
    found = [(1 + m / 8) * 2.0**e for e in range(-40, 1) for m in range(8) if (1 + m / 8) * 2.0**e <= 1]
    positive = np.array(sorted(found))[-count:]
    return np.concatenate([-positive[::-1], [0.0], positive]) if signed else np.concatenate([[0.0], positive])


def nearest_twin(values: np.ndarray, dim: int, *, signed: bool) -> np.ndarray:
    """Nearest code for each value, block by block; ties go away from zero."""
    codes, found = numbers_of_codes(signed=signed), np.zeros(values.shape)
    lines, results = (values, found) if dim else (values.T, found.T)
    for line, result in zip(lines, results, strict=True):
        for begin in range(0, len(line), 256):
            block = line[begin : begin + 256]
            largest = np.abs(block).max()
            if largest > 0:
                shares = np.abs(block).astype(np.float32) / np.float32(largest)
                magnitudes = codes[codes >= 0]
                place = np.abs(magnitudes[None] - shares[:, None]).argmin(1)
                tie = np.minimum(place + 1, len(magnitudes) - 1)
                equal = np.abs(magnitudes[tie] - shares) == np.abs(magnitudes[place] - shares)
                place = np.where(equal, tie, place)
                if not signed:
                    place = np.where((place == 0) & (block > 0), 1, place)
                result[begin : begin + 256] = np.sign(block) * magnitudes[place] * np.float64(largest)
    return found


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_nearest_code(shape: tuple[int, int], dim: int, signed: bool) -> None:
    blocks, given = Blocks(*shape, dim), values(shape, signed=signed)
    codes, scales = quantise(given, blocks, signed=signed, dither=NEAREST)
    assert codes.dtype == (torch.int8 if signed else torch.uint8) and codes.shape == given.shape
    assert scales.numel() == blocks.count * shape[1 - dim]
    wanted = nearest_twin(given.double().numpy(), dim, signed=signed)
    found, largest = dequantise(codes, scales, blocks).double().numpy(), blocks.spread(scales)
    smallest = float(numbers_of_codes(signed=signed)[-127 if signed else 1])
    kept = (given.abs() > 2 * smallest * largest).numpy()
    np.testing.assert_allclose(found[kept], wanted[kept], rtol=1e-6)
    assert (np.abs(found) <= np.abs(2 * smallest * largest.numpy()))[~kept].all()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_error_is_bounded(dim: int, signed: bool) -> None:
    """Errors are at most 1/17 of a number to the nearest, 1/8 with any dither; only the smallest become 0."""
    blocks, given = Blocks(300, 520, dim), values((300, 520), signed=signed)
    for step, bound in (
        (NEAREST, 1 / 17 + 1e-6),
        (dither(torch.tensor(1.0)), 1 / 8),
        (dither(torch.tensor(5.0)), 1 / 8),
    ):
        codes, scales = quantise(given, blocks, signed=signed, dither=step)
        back, largest = dequantise(codes, scales, blocks), blocks.spread(scales)
        kept = given.abs() > largest * 2.0 ** (-15 if signed else -31)
        assert ((back - given).abs() <= bound * given.abs())[kept].all()
        assert (back[given == 0] == 0).all() and torch.equal(back.sign()[kept], given.sign()[kept])
        assert signed or (back[given > 0] > 0).all(), "what others are divided by never becomes 0"
    top = given.abs() == largest
    assert torch.equal(back[top], given[top]), "the largest of a block is exact"


@pytest.mark.parametrize("signed", [True, False])
def test_what_was_read_is_stored_as_it_was(signed: bool) -> None:
    """Every code at many scales, with every kind of dither: a checkpoint or a skipped step changes no bit."""
    blocks = Blocks(400, 256, 1)
    codes = torch.arange(256).repeat(400, 1)
    codes = ((codes - 128).clamp(-127, 127)).to(torch.int8) if signed else codes.to(torch.uint8)
    scales = torch.exp(8 * torch.randn(400, 1, generator=torch.Generator().manual_seed(0)))
    given = dequantise(codes, scales, blocks)
    for step in (NEAREST, *(dither(torch.tensor(float(number))) for number in range(300))):
        again, same = quantise(given, blocks, signed=signed, dither=step)
        assert torch.equal(again, codes) and torch.equal(same, scales)


def test_small_changes_count_over_many_steps() -> None:
    """A mean over 1000 steps with changes far below a unit: dither follows it, rounding to nearest never does."""
    blocks, ends = Blocks(1, 3, 1), {}
    for name in ("dither", "nearest"):
        codes, scales = quantise(torch.tensor([[1.0, 0.01, 0.5]]), blocks, signed=False, dither=NEAREST)
        for step in range(1, 2001):
            moments = dequantise(codes, scales, blocks)
            moments.lerp_(torch.tensor([[1.0, 0.05, 0.1]]), 0.001)
            chosen = dither(torch.tensor(float(step))) if name == "dither" else NEAREST
            codes, scales = quantise(moments, blocks, signed=False, dither=chosen)
        ends[name] = dequantise(codes, scales, blocks)[0]
    left = 0.999**2000
    wanted = torch.tensor([1.0, 0.05 + (0.01 - 0.05) * left, 0.1 + (0.5 - 0.1) * left])
    assert ((ends["dither"] - wanted).abs() / wanted).max() < 0.1
    assert ((ends["nearest"] - wanted).abs() / wanted).max() > 0.5


UNCUT = [
    # name, logical shape, dimension that is split, stored shape of the whole, dimension of the blocks
    ("a layer by its output", (24, 16), 0, (24, 16), 1),
    ("fused QKV", (4, 6, 8, 32), 0, (192, 32), 1),
    ("gate and up", (2, 24, 16), 1, (48, 16), 1),
    ("attention out", (32, 4, 8), 1, (32, 32), 0),
    ("MLP down", (16, 24), 1, (16, 24), 0),
]


@pytest.mark.parametrize(("shape", "dim", "stored", "wanted"), [case[1:] for case in UNCUT], ids=[c[0] for c in UNCUT])
def test_blocks_lie_along_what_no_layout_cuts(
    shape: tuple[int, ...], dim: int, stored: tuple[int, int], wanted: int
) -> None:
    for parts in (1, 2, 4):
        ranges = None if parts == 1 else ((0, shape[dim] // parts),)
        local = list(stored)
        local[1 - wanted] //= parts  # the split takes the other dimension
        assert uncut_dim(Shard("w", shape, dim, ranges), torch.empty(local)) == wanted


def train(optimizer: str, steps: int = 60) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 600), nn.GELU(), nn.Linear(600, 50))
    grads = BucketStore(model.named_parameters(), Axis.single("dp"))
    made = Optimizer(grads, OptimizerConfig(optimizer=optimizer), PrecisionConfig())
    losses = []
    for step in range(steps):
        tokens = torch.randint(50, (64,), generator=torch.Generator().manual_seed(step))
        grads.zero()
        loss = nn.functional.cross_entropy(model(tokens), (7 * tokens + 3) % 50)
        loss.backward()
        grads.reduce()
        made.step(3e-3, 0.1)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(3, 600), (600, 3)])
def test_a_section_has_the_blocks_of_the_matrix(shape: tuple[int, int], dim: int) -> None:
    """Codes and scales of pieces, with each block's maximum over all of them, equal those of the whole."""
    matrix, blocks = values(shape, signed=True), Blocks(*shape, dim)
    codes, scales = quantise(matrix, blocks, signed=True, dither=NEAREST)
    cuts = (0, 1, 599, 600, 601, 1257, 1800)
    for held in combinations_with_replacement(cuts, 2):
        section, piece = Section(blocks, held), matrix.view(-1)[slice(*held)]
        around = section.around(piece)
        assert torch.equal(section.piece_of(around, piece.shape), piece)
        assert torch.count_nonzero(around) == torch.count_nonzero(piece)
        own = section.place(scales)
        assert (own >= section.blocks.largest(around)).all()
        cut, _ = quantise(around, section.blocks, signed=True, dither=NEAREST, scales=own)
        assert torch.equal(section.piece_of(cut, piece.shape), codes.view(-1)[slice(*held)])


def test_training_is_near_adamws() -> None:
    ours, theirs = train("adam8bit"), train("adam")
    assert theirs[-1] < 0.3 * theirs[0], "the task must be learnt to prove anything"
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 0.01
    assert ours != theirs


def test_planted_bug_a_division_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: rounds second moments to 0 although first ones are not."""
    quantised = eight_bits.quantise

    def rounded(values: Tensor, blocks: Blocks, *, signed: bool, **rest: Any) -> tuple[Tensor, Tensor]:
        codes, scales = quantised(values, blocks, signed=signed, **rest)
        return (codes if signed else torch.where(codes < 220, 0, codes)), scales

    monkeypatch.setattr("megatron.optimizer.rules.eight_bit_moments.quantise", rounded)
    with pytest.raises(AssertionError):
        test_training_is_near_adamws()

"""Blocks of numbers in 8 bits each: small floating-point numbers, relative to the largest of their block.

A code is the top of an fp32 number: 3 bits of mantissa, below them the number is cut off. Unsigned codes have 5 bits of
exponent, down to 2**-31.75 of the largest; signed ones 4, down to 2**-15.75. The largest itself is exact.

Before it is cut off, `dither` is added to what is cut: half a unit rounds to the nearest; another value at each step
lets changes smaller than a unit count in the long run, which rounding to the nearest loses step after step. A number
that is already one of the codes stays that code with any dither, so storing what was read changes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.state.division import Range

BLOCK = 256
_CUT = 20
"""Bits of an fp32 number that are cut off."""
_ONE = (127 << 23) >> _CUT
"""What is left of 1.0: the largest code stands for it."""
NEAREST = 1 << (_CUT - 1)
_MARGIN = 1 << 8
"""Keeps dither off its ends, so that a code that was scaled back and forth with rounding errors is still that code."""
_GOLDEN = 0.6180339887498949


def dither(step: Tensor) -> Tensor:
    """A value between its ends for each step; those of consecutive steps are spread evenly."""
    share = torch.frac(step.double() * _GOLDEN)
    return (_MARGIN + share * ((1 << _CUT) - 2 * _MARGIN)).to(torch.int32)


@dataclass(frozen=True)
class Blocks:
    """How a matrix is cut: into blocks of up to BLOCK numbers along `dim`."""

    rows: int
    columns: int
    dim: int

    @property
    def count(self) -> int:
        return -(-(self.columns if self.dim else self.rows) // BLOCK)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a tensor with one number per block: [rows, count] if blocks run along the columns, else [count,
        columns]."""
        return (self.rows, self.count) if self.dim else (self.count, self.columns)

    def largest(self, values: Tensor) -> Tensor:
        """The largest magnitude of each block."""
        if self.rows == 0:
            return values.new_zeros(self.shape)
        parts = [part.abs().amax(self.dim) for part in values.view(self.rows, self.columns).split(BLOCK, self.dim)]
        return torch.stack(parts, self.dim)

    def spread(self, scales: Tensor) -> Tensor:
        """The scale of each number, as a matrix."""
        size = self.columns if self.dim else self.rows
        return scales.repeat_interleave(BLOCK, self.dim).narrow(self.dim, 0, size)


@dataclass(frozen=True)
class Section:
    """The rows of a matrix that contain a piece of it: all blocks that the piece is part of, with zeros outside the
    piece."""

    whole: Blocks
    held: Range
    """Elements of the matrix."""

    @property
    def rows(self) -> Range:
        start, stop = self.held
        if start == stop:
            return 0, 0
        first = start // self.whole.columns
        return first if self.whole.dim else first // BLOCK * BLOCK, -(-stop // self.whole.columns)

    @property
    def blocks(self) -> Blocks:
        first, last = self.rows
        return Blocks(last - first, self.whole.columns, self.whole.dim)

    def around(self, piece: Tensor) -> Tensor:
        """The section [rows, columns] with the piece in its place and zeros elsewhere."""
        blocks = self.blocks
        if piece.numel() == blocks.rows * blocks.columns:
            return piece.reshape(blocks.rows, blocks.columns)
        padded = piece.new_zeros(blocks.rows * blocks.columns)
        self._piece(padded).copy_(piece)
        return padded.view(blocks.rows, blocks.columns)

    def piece_of(self, matrix: Tensor, shape: torch.Size) -> Tensor:
        """The reverse of `around`."""
        return self._piece(matrix.view(-1)).view(shape)

    def place(self, scales: Tensor) -> Tensor:
        """The scales of this section, in `blocks.shape`, out of those of the whole matrix."""
        first, _ = self.rows
        return scales.narrow(0, first if self.whole.dim else first // BLOCK, self.blocks.shape[0])

    def _piece(self, flat: Tensor) -> Tensor:
        before = self.held[0] - self.rows[0] * self.whole.columns if flat.numel() else 0
        return flat[before : before + self.held[1] - self.held[0]]


def quantise(
    values: Tensor, blocks: Blocks, *, signed: bool, dither: Tensor | int, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(codes, scales): int8 or uint8 in the shape of `values`, and the largest magnitude of each block in fp32: the
    given ones, where other ranks have parts of the blocks.

    Unsigned numbers above 0 never become 0, since they are what others are divided by.
    """
    matrix = values.float().reshape(blocks.rows, blocks.columns)
    scales = blocks.largest(matrix) if scales is None else scales
    spread = blocks.spread(scales)
    relative = torch.where(spread > 0, matrix.abs() / spread, 0.0)
    most = 127 if signed else 255
    codes = ((relative.view(torch.int32) + dither) >> _CUT) - (_ONE - most)
    codes = codes.clamp_(0 if signed else 1, most)
    if signed:
        codes = torch.where(matrix < 0, -codes, codes).to(torch.int8)
    else:
        codes = torch.where(matrix > 0, codes, 0).to(torch.uint8)
    return codes.view(values.shape), scales


def dequantise(codes: Tensor, scales: Tensor, blocks: Blocks) -> Tensor:
    """fp32."""
    signed = codes.dtype == torch.int8
    wide = codes.reshape(blocks.rows, blocks.columns).to(torch.int32)
    magnitude = wide.abs()
    top = (magnitude + (_ONE - (127 if signed else 255))) << _CUT
    relative = torch.where(magnitude > 0, top.view(torch.float32), 0.0)
    return (torch.where(wide < 0, -relative, relative) * blocks.spread(scales)).view(codes.shape)

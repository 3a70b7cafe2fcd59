"""Blocks of numbers in 8 bits each: small floating-point numbers, relative to the largest of their block.

A code is the top of an fp32 number, truncated after 3 bits of mantissa. Unsigned codes have 5 bits of exponent and
reach down to 2**-31.75 of the largest. Signed codes have 4 bits and reach 2**-15.75. The largest number is exact.

Before truncation, `dither` is added to the bits that will be cut. Half a unit rounds to nearest. A different value at
each step lets changes smaller than a unit accumulate; rounding to nearest would lose them at every step. A number that
is already a code keeps its code with any dither, so storing what was read changes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.state.division import Range

BLOCK = 256
_CUT = 20
"""Number of low bits of an fp32 number that are cut off."""
_ONE = (127 << 23) >> _CUT
"""1.0 without the cut bits: the largest code decodes to it."""
NEAREST = 1 << (_CUT - 1)
_MARGIN = 1 << 8
"""Margin at both ends of the dither: a code that was rescaled with rounding errors keeps its value."""
_GOLDEN = 0.6180339887498949


def dither(step: Tensor) -> Tensor:
    """Dither of a step. Values of consecutive steps are spread evenly."""
    share = torch.frac(step.double() * _GOLDEN)
    return (_MARGIN + share * ((1 << _CUT) - 2 * _MARGIN)).to(torch.int32)


@dataclass(frozen=True)
class Blocks:
    """Division of a matrix into blocks of up to BLOCK numbers along `dim`."""

    rows: int
    columns: int
    dim: int

    @property
    def count(self) -> int:
        return -(-(self.columns if self.dim else self.rows) // BLOCK)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a tensor with one number per block: [rows, count] if blocks run along the columns, else [count,
        columns]."""
        return (self.rows, self.count) if self.dim else (self.count, self.columns)

    def largest(self, values: Tensor) -> Tensor:
        """Largest magnitude of each block."""
        if self.rows == 0:
            return values.new_zeros(self.shape)
        parts = [part.abs().amax(self.dim) for part in values.view(self.rows, self.columns).split(BLOCK, self.dim)]
        return torch.stack(parts, self.dim)

    def spread(self, scales: Tensor) -> Tensor:
        """Scale of each number, as a matrix."""
        size = self.columns if self.dim else self.rows
        return scales.repeat_interleave(BLOCK, self.dim).narrow(self.dim, 0, size)


@dataclass(frozen=True)
class Section:
    """Rows of a matrix that contain a piece of it: all blocks that overlap the piece, with zeros outside the piece."""

    whole: Blocks
    held: Range
    """Range of the matrix's elements."""

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
        """Section [rows, columns] with the piece in its place and zeros elsewhere."""
        blocks = self.blocks
        if piece.numel() == blocks.rows * blocks.columns:
            return piece.reshape(blocks.rows, blocks.columns)
        padded = piece.new_zeros(blocks.rows * blocks.columns)
        self._piece(padded).copy_(piece)
        return padded.view(blocks.rows, blocks.columns)

    def piece_of(self, matrix: Tensor, shape: torch.Size) -> Tensor:
        """Returns the piece from a section made by `around`."""
        return self._piece(matrix.view(-1)).view(shape)

    def place(self, scales: Tensor) -> Tensor:
        """Selects this section's scales, in `blocks.shape`, from the scales of the whole matrix."""
        first, _ = self.rows
        return scales.narrow(0, first if self.whole.dim else first // BLOCK, self.blocks.shape[0])

    def _piece(self, flat: Tensor) -> Tensor:
        before = self.held[0] - self.rows[0] * self.whole.columns if flat.numel() else 0
        return flat[before : before + self.held[1] - self.held[0]]


def quantise(
    values: Tensor, blocks: Blocks, *, signed: bool, dither: Tensor | int, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (codes, scales): int8 or uint8 in the shape of `values`, and the fp32 largest magnitude of each block.

    Pass `scales` if other ranks hold parts of the blocks. Unsigned numbers above 0 never become 0, because they are
    divisors.
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
    """Decodes to fp32."""
    signed = codes.dtype == torch.int8
    wide = codes.reshape(blocks.rows, blocks.columns).to(torch.int32)
    magnitude = wide.abs()
    top = (magnitude + (_ONE - (127 if signed else 255))) << _CUT
    relative = torch.where(magnitude > 0, top.view(torch.float32), 0.0)
    return (torch.where(wide < 0, -relative, relative) * blocks.spread(scales)).view(codes.shape)

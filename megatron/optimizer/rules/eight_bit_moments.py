"""Moments of Adam in 8 bits each, plus 4 bytes per block of 256.

Blocks run along the dimension of a matrix that tensor parallelism never cuts, so every layout has the same blocks.
ZeRO's pieces may cut a block; the ranks with parts of a block then agree on the largest number in it. A checkpoint
holds the moments in fp32, as for AdamW; loading them gives the same codes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis
from megatron.optimizer.rules.adam import AsWeights
from megatron.optimizer.rules.base import Slot
from megatron.optimizer.rules.eight_bits import NEAREST, Section, dequantise, dither, quantise

_SIGNED = {"exp_avg": True, "exp_avg_sq": False}


@dataclass(frozen=True)
class InBlocks:
    """Position of this rank's piece of a matrix among the blocks that are quantised together."""

    section: Section
    axis: Axis
    """Ranks that hold the other pieces."""

    def scales(self, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Largest magnitude of each block, over all pieces. A collective."""
        blocks = self.section.blocks
        own = {kind: blocks.largest(moment.float()) for kind, moment in moments.items()}
        if self.axis.size == 1:
            return own
        sample = next(iter(own.values()))
        whole = {kind: sample.new_zeros(self.section.whole.shape) for kind in own}
        for kind, scales in own.items():
            self.section.place(whole[kind]).copy_(scales)
        flat = collectives.all_reduce(torch.stack(list(whole.values())), self.axis, "max")
        return {kind: self.section.place(scales).clone() for kind, scales in zip(whole, flat, strict=True)}


@dataclass(frozen=True, eq=False)
class EightBits(AsWeights):
    in_blocks: Mapping[str, InBlocks]
    """Matrices by name. One-dimensional parameters are few: their moments stay in the weight's dtype."""
    loads_in_place = False

    def made(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if name not in self.in_blocks:
            return super().made(name, tensor)
        state, section = {}, self.in_blocks[name].section
        zeros = torch.zeros(section.blocks.rows, section.blocks.columns, device=tensor.device)
        for kind, signed in _SIGNED.items():
            codes, state[_scale(kind)] = quantise(zeros, section.blocks, signed=signed, dither=NEAREST)
            state[kind] = section.piece_of(codes, tensor.shape).clone()
        return state

    def read(self, slot: Slot) -> dict[str, Tensor]:
        if slot.name not in self.in_blocks:
            return {kind: slot.state[kind] for kind in _SIGNED}
        section, found = self.in_blocks[slot.name].section, {}
        for kind in _SIGNED:
            wide = dequantise(section.around(slot.state[kind]), slot.state[_scale(kind)], section.blocks)
            found[kind] = section.piece_of(wide, slot.tensor.shape).to(slot.tensor.dtype)
        return found

    def write(self, slot: Slot, moments: Mapping[str, Tensor]) -> None:
        self._store(slot, moments, dither(slot.step))

    def saved(self, slot: Slot) -> dict[str, Tensor]:
        return self.read(slot)

    def restore(self, slot: Slot, saved: Mapping[str, Tensor]) -> None:
        self._store(slot, {kind: saved[kind] for kind in _SIGNED}, NEAREST)

    def _store(self, slot: Slot, moments: Mapping[str, Tensor], dither: Tensor | int) -> None:
        if slot.name not in self.in_blocks:
            for kind, moment in moments.items():
                slot.state[kind].copy_(moment)
            return
        own = self.in_blocks[slot.name]
        around = {kind: own.section.around(moment) for kind, moment in moments.items()}
        for kind, scales in own.scales(around).items():
            codes, _ = quantise(around[kind], own.section.blocks, signed=_SIGNED[kind], dither=dither, scales=scales)
            slot.state[kind].copy_(own.section.piece_of(codes, slot.state[kind].shape))
            slot.state[_scale(kind)].copy_(scales)


def _scale(kind: str) -> str:
    return f"{kind}_scale"

"""Cache of the keys and values of past tokens, so that a pass of generation computes only its new tokens."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron.model.attention_mask import Visible, Window, look_back

SPARE = 64
"""Number of slots beyond the window. The cache drops old tokens once per SPARE tokens."""


class KVCache:
    """Cache preallocated for `max_length` tokens or, with an attention window, for the tokens within the window. All
    rows of the batch end in the same slot, so that a pass writes one slice; a shorter row begins in a later slot.

    In a pass the model calls `begin`, every layer calls `extend`, then the model calls `advance`.
    """

    def __init__(
        self,
        layers: Iterable[int],
        *,
        batch: int,
        groups: int,
        max_length: int,
        head_dim: int,
        dtype: torch.dtype,
        window: Window = None,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (batch, groups, slots_for(max_length, window), head_dim)
        self.keys = {layer: torch.empty(shape, dtype=dtype, device=device) for layer in layers}
        self.values = {layer: torch.empty(shape, dtype=dtype, device=device) for layer in layers}
        self.slots, self.max_length, self.window = shape[2], max_length, window
        self.length = 0  # tokens so far
        self._used = 0  # slots
        self._own: Tensor | None = None  # [batch, 1, 1, slots]: slots that hold a row's tokens; None: all
        self._all_own_from = 0

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for kept in (self.keys, self.values) for tensor in kept.values())

    def begin(self, tokens: int) -> Visible:
        """Begins a pass of `tokens` new tokens; a full cache drops tokens outside the window. Returns which of the keys
        from `extend` each query sees."""
        whole = self.length + tokens
        assert whole <= self.max_length, f"a KV cache of {self.max_length} tokens cannot hold {whole}"
        reach = look_back(self.window)
        if reach is not None and self._used + tokens > self.slots and self._used > reach:
            self._drop(self._used - reach)
        first, keys = self._first(), self._used + tokens
        if self._own is None or first >= self._all_own_from:
            return Visible(left=reach)
        assert tokens == 1, "prompts of different lengths: a pass must have one token"
        return Visible(rows=self._own[..., first:keys])

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Appends key and value [batch, groups, new, head_dim]. Returns both with the past ones in front."""
        return self._extend(self.keys[layer], key), self._extend(self.values[layer], value)

    def _extend(self, kept: Tensor, new: Tensor) -> Tensor:
        end = self._used + new.shape[2]
        if end <= self.slots:
            kept.narrow(2, self._used, new.shape[2]).copy_(new)
            first = self._first()
            return kept.narrow(2, first, end - first)
        assert self.window is not None, f"a KV cache of {self.slots} tokens cannot hold {end}"
        whole = torch.cat([kept[:, :, self._first() : self._used], new], 2)
        kept.copy_(whole[:, :, -self.slots :])
        return whole

    def advance(self, tokens: int) -> None:
        self.length += tokens
        self._used = min(self._used + tokens, self.slots)

    def _first(self) -> int:
        """First slot that the next token sees."""
        reach = look_back(self.window)
        return 0 if reach is None else max(0, self._used - reach)

    def _drop(self, slots: int) -> None:
        """Drops the first `slots` slots."""
        for kept in (*self.keys.values(), *self.values.values()):
            kept[:, :, : self._used - slots] = kept[:, :, slots : self._used].clone()
        if self._own is not None:
            self._own[..., : self.slots - slots] = self._own[..., slots:].clone()
            self._own[..., self.slots - slots :] = True
        self._all_own_from = max(0, self._all_own_from - slots)
        self._used -= slots

    # ------------------------------------------------------------ rows of different lengths

    def prompts(self, lengths: Sequence[int]) -> "list[tuple[slice, KVCache]]":
        """Prepares the cache for prompts of these lengths. Prompts of equal length must be in adjacent rows.

        Returns, for each length, the rows of its prompts and a cache for their pass, which is a view of `self`. After
        all these passes, generation continues with `self`."""
        some = next(iter(self.keys.values()))
        assert self.length == 0 and len(lengths) == some.shape[0]
        longest, stop = max(lengths), min(max(lengths), self.slots)
        starts = [max(0, stop - length) for length in lengths]
        self.length, self._used = longest, stop
        if any(starts):
            slots = torch.arange(self.slots)
            self._own = (slots >= torch.tensor(starts).unsqueeze(1))[:, None, None].to(
                next(iter(self.keys.values())).device
            )
            self._all_own_from = max(starts)
            self._clear_before(starts)
        parts, first = [], 0
        for row in range(1, len(lengths) + 1):
            if row == len(lengths) or lengths[row] != lengths[first]:
                rows = slice(first, row)
                parts.append((rows, self._part(rows, slice(starts[first], stop), lengths[first])))
                first = row
        return parts

    def _clear_before(self, starts: Sequence[int]) -> None:
        """Zeros the slots before each row. Attention gives them weight 0, but 0 x uninitialised memory may be NaN."""
        for kept in (*self.keys.values(), *self.values.values()):
            for row, start in enumerate(starts):
                kept[row, :, :start].zero_()

    def _part(self, rows: slice, slots: slice, tokens: int) -> "KVCache":
        """Returns an empty cache on the memory of these rows and slots."""
        part = object.__new__(KVCache)
        part.keys = {layer: kept[rows, :, slots] for layer, kept in self.keys.items()}
        part.values = {layer: kept[rows, :, slots] for layer, kept in self.values.items()}
        part.slots, part.max_length, part.window = slots.stop - slots.start, tokens, self.window
        part.length = part._used = part._all_own_from = 0
        part._own = None
        return part

    def take(self, rows: Tensor) -> None:
        """Replaces row i by row `rows[i]`; rows may be repeated or dropped, and their number may change."""
        for kept in (self.keys, self.values):
            for layer, tensor in kept.items():
                taken = tensor.new_empty((len(rows), *tensor.shape[1:]))
                taken[:, :, : self._used] = tensor[:, :, : self._used][rows]
                kept[layer] = taken
        if self._own is not None:
            self._own = self._own[rows]


def slots_for(max_length: int, window: Window) -> int:
    reach = look_back(window)
    return max_length if reach is None else min(max_length, reach + SPARE)

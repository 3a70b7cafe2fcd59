"""Boundaries of the documents in a micro-batch, for attention that does not cross them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Documents in the rows of a micro-batch. No document crosses the end of a row.

    Tokens are counted row after row. Boundaries are int32 [documents + 1]: the index of each document's first token,
    then the number of all tokens. The method `of_starts` repeats the last number up to a length of 2^n + 1, so that few
    shapes occur. The last documents are then empty.
    """

    keys: Tensor
    """Boundaries among the keys."""
    queries: Tensor
    """Boundaries among the queries. They differ from `keys` if the queries are only the last tokens of each row."""
    rows: int
    seq: int
    """Number of keys of a row."""
    longest: int
    """Upper bound of the number of keys of a document."""
    divide_rows: bool = True
    """False if each row is one document."""

    @staticmethod
    def of_starts(starts: Tensor) -> "Documents":
        """`starts` [rows, seq]: true at the first token of a document. The first token of a row always starts one."""
        starts = torch.cat([torch.ones_like(starts[:, :1]), starts[:, 1:]], 1)
        first = starts.flatten().nonzero().flatten().to(torch.int32)
        length = 1 << (len(first) - 1).bit_length()
        ends = first.new_full((length + 1 - len(first),), starts.numel())
        rows, seq = starts.shape
        return Documents.of_boundaries(torch.cat([first, ends]), rows, seq, len(first) > rows)

    @staticmethod
    def of_boundaries(boundaries: Tensor, rows: int, seq: int, divide_rows: bool) -> "Documents":
        """`boundaries`: int32 [documents + 1] on the CPU, as `Documents` describes."""
        lengths = boundaries.diff()
        longest, total = int(lengths.max()), rows * seq
        if boundaries[0] != 0 or boundaries[-1] != total or bool((lengths < 0).any()):
            first, last = int(boundaries[0]), int(boundaries[-1])
            raise DataError(
                f"document boundaries from {first} to {last}: they must rise from 0 to {total} for {rows} rows of "
                f"{seq} tokens; count the tokens of all rows"
            )
        if longest > seq or not bool(torch.isin(torch.arange(0, total, seq), boundaries).all()):
            raise DataError(
                f"document boundaries: a document crosses the end of a row of {seq} tokens (the longest document has "
                f"{longest}); add the first token of each row to the boundaries"
            )
        return Documents(
            keys=boundaries, queries=boundaries, rows=rows, seq=seq, longest=longest, divide_rows=divide_rows
        )

    @staticmethod
    def of_ids(ids: Tensor) -> "Documents":
        """`ids` [rows, seq]: the tokens of a document are adjacent and have one id. Causes a host sync."""
        starts = torch.ones_like(ids, dtype=torch.bool)
        starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
        return Documents.of_starts(starts)

    @staticmethod
    def of_rows(rows: int, seq: int, device: torch.device, queries: int | None = None) -> "Documents":
        """Returns one document per row. `queries`: number of queries of a row, which are the last of its keys."""
        numbers = torch.arange(rows + 1, dtype=torch.int32, device=device)
        of_queries = numbers * (seq if queries is None else queries)
        return Documents(keys=numbers * seq, queries=of_queries, rows=rows, seq=seq, longest=seq, divide_rows=False)

    def check_shape(self, rows: int, seq: int) -> None:
        """Raises if these are not the documents of `rows` rows of `seq` keys: a GPU would read beyond the keys."""
        if (self.rows, self.seq) != (rows, seq):
            raise DataError(
                f"document_ids of {self.rows} rows of {self.seq} tokens for a batch of {rows} rows of {seq} tokens; "
                "give the documents of the whole sequence, also with --context-parallel-size"
            )

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Documents":
        """Returns the boundaries on another device."""
        keys = self.keys.to(device, non_blocking=non_blocking)
        queries = keys if self.queries is self.keys else self.queries.to(device, non_blocking=non_blocking)
        return replace(self, keys=keys, queries=queries)

    def pin_memory(self) -> "Documents":
        """Returns a copy in pinned memory. torch's DataLoader calls this method."""
        pinned = self.keys.pin_memory()
        return replace(self, keys=pinned, queries=pinned)

    def record_stream(self, stream: torch.Stream) -> None:
        """Calls `Tensor.record_stream` of the boundaries."""
        self.keys.record_stream(stream)

    def for_recording(self) -> "Documents":
        """Returns a copy to record a CUDA graph with. `copy_` writes other boundaries to its memory before a replay."""
        place = self.keys.clone()
        return replace(self, keys=place, queries=place, longest=self.seq, divide_rows=True)

    def fits(self, other: "Documents") -> bool:
        """True if `copy_` can take the boundaries of `other`."""
        return len(other.keys) <= len(self.keys)

    def copy_(self, other: "Documents") -> None:
        """Overwrites the boundaries in place. If `other` has fewer documents, the remaining ones become empty."""
        given = len(other.keys)
        self.keys[:given].copy_(other.keys)
        self.keys[given:].fill_(self.rows * self.seq)

    def part(self, first: int, end: int) -> "Documents":
        """Returns the documents for the queries [first, end) and the keys [0, end) of each row."""
        row = torch.div(self.keys[:-1], self.seq, rounding_mode="floor") * self.seq
        begin, stop = self.keys[:-1] - row, self.keys[1:] - row
        keys, queries = stop.clamp(max=end) - begin.clamp(max=end), stop.clamp(first, end) - begin.clamp(first, end)
        return replace(
            self, keys=_boundaries(keys), queries=_boundaries(queries), seq=end, longest=min(self.longest, end)
        )

    def numbers(self) -> Tensor:
        """Returns the number of each key's document, int64 [rows, seq]. Each row has its own documents."""
        places = torch.arange(self.rows * self.seq, dtype=torch.int32, device=self.keys.device)
        return (torch.searchsorted(self.keys, places, right=True) - 1).view(self.rows, self.seq)

    def first_keys(self, queries: int, left: int | None) -> Tensor:
        """Returns int64 [rows, queries]: the first key that each of the last `queries` tokens of a row sees.

        Argument `left` is the number of keys that a query sees before its own position; None: all."""
        rows = torch.arange(self.rows, device=self.keys.device).unsqueeze(1) * self.seq
        first = self.keys.long()[self.numbers()[:, self.seq - queries :]] - rows
        if left is None:
            return first
        own = torch.arange(self.seq - queries, self.seq, device=self.keys.device)
        return torch.maximum(first, own - left)

    def mask(self, queries: int, left: int | None) -> Tensor:
        """Returns [rows, 1, queries, seq], true for visible keys."""
        place = torch.arange(self.seq, device=self.keys.device)
        seen = place >= self.first_keys(queries, left).unsqueeze(2)
        return (seen & (place <= place[self.seq - queries :].unsqueeze(1))).unsqueeze(1)


def _boundaries(lengths: Tensor) -> Tensor:
    return pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))

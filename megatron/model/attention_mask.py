"""The keys that the queries of a pass see."""

from dataclasses import dataclass

from torch import Tensor

from megatron.ops.documents import Documents

Window = tuple[int, int] | None  # tokens that a query may look back and ahead; -1 is no limit


@dataclass(frozen=True)
class Visible:
    """The keys that each query of a pass sees. A query sees no later keys. The pass's queries are at the positions of
    the last keys."""

    documents: Documents | None = None
    """Documents of the rows; None if each row is one document."""
    left: int | None = None
    """Number of keys that a query sees before its own position; None: all."""
    rows: Tensor | None = None
    """Mask [batch, 1, 1, keys], true for visible keys. Replaces the fields above in a pass with one query per row."""

    def is_packed(self, keys: int) -> bool:
        """True if a query may not see all keys up to its own."""
        return self.documents is not None or (self.left is not None and self.left + 1 < keys)


def look_back(window: Window) -> int | None:
    """Number of tokens that a query sees before its own position; None: all. `window[1]` has no effect, because later
    tokens are hidden anyway."""
    return None if window is None or window[0] < 0 else window[0]


def documents_of(given: Documents | Tensor | None) -> Documents | None:
    """Documents of a forward pass; None if each row is one document. Converting document ids [batch,
    seq] is a host sync on a GPU."""
    documents = Documents.of_ids(given) if isinstance(given, Tensor) else given
    return documents if documents is not None and documents.divide_rows else None

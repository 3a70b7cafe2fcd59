"""The datasets of a run, and the lines to print about them."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.validation import SET_PREFIX
from megatron.data.blended import TokenDataset
from megatron.data.sources import SourceContent


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run; None for an empty or unused split. The caller prints `table`, `notes` and `warnings`."""

    train: TokenDataset | None
    valid: TokenDataset | None
    test: TokenDataset | None
    table: str
    notes: tuple[str, ...] = ()
    fingerprint: str = ""  # of the data's content, for the checkpoint
    sources: Sequence[SourceContent] = ()  # compared between ranks
    warnings: tuple[str, ...] = ()
    full_table: str = ""  # every source; `table` may be abbreviated
    validation_sets: tuple[tuple[str, TokenDataset], ...] = ()  # by name, under --multiple-validation-sets

    @property
    def validated(self) -> dict[str, TokenDataset]:
        """Validation sets whose loss an evaluation reports, by the name in its log records."""
        if self.validation_sets:
            return {f"{SET_PREFIX}{name}": dataset for name, dataset in self.validation_sets}
        return {} if self.valid is None else {"valid": self.valid}

"""The datasets of a run, and the lines to print about them."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.validation import SET_PREFIX
from megatron.data.blended import TokenDataset
from megatron.data.sources import SourceContent


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run; None where a split is empty or unused. `table`, `notes`, `warnings` are to be printed."""

    train: TokenDataset | None
    valid: TokenDataset | None
    test: TokenDataset | None
    table: str
    notes: tuple[str, ...] = ()
    fingerprint: str = ""  # of the data's content, for the checkpoint
    sources: Sequence[SourceContent] = ()  # what the ranks of a run compare
    warnings: tuple[str, ...] = ()
    full_table: str = ""  # every source, where `table` is abbreviated
    validation_sets: tuple[tuple[str, TokenDataset], ...] = ()  # by name, under --multiple-validation-sets

    @property
    def validated(self) -> dict[str, TokenDataset]:
        """Each set that an evaluation reports a loss of, by the name of its records."""
        if self.validation_sets:
            return {f"{SET_PREFIX}{name}": dataset for name, dataset in self.validation_sets}
        return {} if self.valid is None else {"valid": self.valid}

"""The table of how each parameter is split, and what follows from it: specs and initial values."""

from megatron.parallelize.initialise import initialise_gpt
from megatron.parallelize.table import Row, foreign_specs, gpt_specs, gpt_table, match_table, persistent_buffers

__all__ = [
    "Row",
    "foreign_specs",
    "gpt_specs",
    "gpt_table",
    "initialise_gpt",
    "match_table",
    "persistent_buffers",
]

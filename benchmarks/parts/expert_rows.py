"""Arguments of the operations on experts' rows: two of eight experts for each token."""

from functools import cache
from typing import Any

import torch

from benchmarks.parts.grown import ELEMENTS
from megatron.ops.expert_rows import ByExpert, by_expert

TOKENS, WIDTH = 4096, 1024


def tokens_on(device: str) -> int:
    """Returns the number of tokens: on a GPU so many that `grown` leaves the arguments as they are."""
    return TOKENS if device == "cpu" else ELEMENTS // WIDTH


@cache
def order_of_experts(device: str) -> ByExpert:
    chosen = torch.randint(8, (2 * tokens_on(device),), generator=torch.Generator().manual_seed(1))
    return by_expert(chosen.to(device), 8, 0)


def taken_inputs(dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """Makes the arguments of `taken`. Forward reads a token and writes two rows; backward does the opposite."""
    return torch.randn(tokens_on(device), WIDTH, device=device).to(dtype), order_of_experts(device), 2


def weighted_inputs(dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """Makes the arguments of `weighted_sum`. Forward reads two rows of a token and writes one. Backward reads the rows
    and, for each of them, dy; it writes two rows."""
    tokens = tokens_on(device)
    rows = torch.randn(2 * tokens, WIDTH, device=device).to(dtype)
    return rows, order_of_experts(device), torch.randn(tokens, 2, device=device).to(dtype)

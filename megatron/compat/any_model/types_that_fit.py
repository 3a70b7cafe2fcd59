"""Rewrites torch's dtype errors to name the model's dtype and the fix."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron.errors import ConfigError


class TypesThatFit:
    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """`dtype`: the dtype that the settings give the model."""
        self._model = model
        self._at_first = {dtype, *(one.dtype for one in model.parameters())}

    def explain(self, error: RuntimeError, inputs: Any) -> None:
        """Raises an error that names the dtypes, if torch's error is about them."""
        if "type" not in str(error):
            return
        here = {one.dtype for one in self._model.parameters()}
        if not here <= self._at_first:
            raise ConfigError(
                f"engine(x): the model was cast to {_listed(here - self._at_first)} after "
                "megatron.compat.initialize(), but gradient buffers and masters were not; remove the cast, and set "
                "the precision in the config (fp16, bf16)"
            ) from error
        others = {one.dtype for one in tree_leaves(inputs) if isinstance(one, Tensor) and one.is_floating_point()}
        if others - here:
            raise ConfigError(
                f"engine(x): an input is {_listed(others - here)}, but the model is {_listed(here)} ({error}); cast "
                "the input, as in x.float(), or cast the model before megatron.compat.initialize()"
            ) from error


def _listed(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(str(one).removeprefix("torch.") for one in dtypes))

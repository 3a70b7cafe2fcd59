"""The edge of the process: which errors become one line."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.errors import ConfigError, MemoryShortError
from megatron.training.exit import as_megatron_error


def test_a_python_without_our_dependencies_is_told_how_to_get_them() -> None:
    told = as_megatron_error(ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert isinstance(told, ConfigError)
    assert "pip install -r requirements.txt" in str(told)


def test_a_module_of_somebody_elses_keeps_its_traceback() -> None:
    error = ModuleNotFoundError("No module named 'my_model'", name="my_model")
    assert as_megatron_error(error) is error


def test_too_little_memory_is_one_line_with_a_way_out() -> None:
    def allocate() -> None:
        torch.empty(10**15)

    def ask_python() -> None:
        np.empty(10**15)

    for what in (allocate, ask_python):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            what()
        told = as_megatron_error(caught.value)
        assert isinstance(told, MemoryShortError)
        assert str(told).startswith("out of memory: ") and "--micro-batch-size" in str(told) and "\n" not in str(told)
    assert isinstance(as_megatron_error(torch.OutOfMemoryError("CUDA out of memory.")), MemoryShortError)

"""The edge of the process: which errors become one line."""

from __future__ import annotations

from megatron.errors import ConfigError
from megatron.training.exit import as_megatron_error


def test_a_python_without_our_dependencies_is_told_how_to_get_them() -> None:
    told = as_megatron_error(ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert isinstance(told, ConfigError)
    assert "pip install -r requirements.txt" in str(told)


def test_a_module_of_somebody_elses_keeps_its_traceback() -> None:
    error = ModuleNotFoundError("No module named 'my_model'", name="my_model")
    assert as_megatron_error(error) is error

"""The edge of the process: which errors become one line."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from megatron.errors import ConfigError, HangError, MemoryShortError, PeerLostError
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


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[/src/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer", PeerLostError),
        ("[/src/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 15000ms for recv operation", HangError),
        ("Application timeout caused pair closure", HangError),  # gloo, in the operation after one that timed out
    ],
)
def test_a_collective_that_failed_is_one_line(text: str, kind: type[Exception]) -> None:
    told = as_megatron_error(RuntimeError(text))
    assert type(told) is kind and text in str(told) and "\n" not in str(told)


HANGING = """
import time
from megatron.distributed import launch
from megatron.errors import ConfigError
from megatron.training import exit

launch.shutdown = lambda **how: time.sleep(600)  # a group whose last collective never ends
exit._LEAVES_WITHIN = 0.2

def body():
    PLANTED

exit.run_as_program(body)
"""


@pytest.mark.parametrize(
    ("planted", "code", "line"),
    [
        ("raise ConfigError('planted')", 2, "error: planted"),
        ("return 1 / 0", 1, "ZeroDivisionError: division by zero"),
    ],
)
def test_an_error_is_said_though_leaving_hangs(planted: str, code: int, line: str) -> None:
    command = [sys.executable, "-c", HANGING.replace("PLANTED", planted)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code and done.stderr.splitlines()[-1] == line, done.stderr

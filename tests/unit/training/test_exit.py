"""Exit of the process: errors that become one line."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.checkpoint.run_state import RunHistory
from megatron.config import parse_args
from megatron.errors import ConfigError, HangError, MemoryShortError, PeerLostError
from megatron.training.exit import as_megatron_error
from megatron.training.watchdog import Position
from tests.helpers.runs import REPOSITORY, flags


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


@pytest.mark.parametrize(
    ("given", "committed", "loaded", "text"),
    [
        (
            {},
            {},
            {},
            "so the 7 iterations are lost; give --save DIR and --save-interval 100 to save regularly, or --save",
        ),
        (
            {"save": "B"},
            {},
            {},
            "lost; give --save-interval 100 to save regularly, or --exit-signal-handler to save when",
        ),
        ({"save": "B", "save_interval": 9, "exit_signal_handler": True}, {}, {}, "below 9 to save more often"),
        ({"save": "B", "load": "A"}, {}, {"A": 3}, "start again with --load A to continue from iteration 3"),
        ({"save": "B", "load": "A"}, {"B": {4, 8}}, {"A": 3}, "start again with --load B to continue from iteration 8"),
    ],
)
def test_a_signal_says_what_is_left(
    given: dict[str, Any], committed: dict[str, set[int]], loaded: dict[str, int], text: str
) -> None:
    history = RunHistory("run", started_from=3)
    history.loaded = {Path(folder): step for folder, step in loaded.items()}
    history.committed = {Path(folder): steps for folder, steps in committed.items()}
    run: Any = SimpleNamespace(config=parse_args(flags(**given)))
    position = Position(run, history)
    with pytest.raises(KeyboardInterrupt) as early, position.told_at_end():
        raise KeyboardInterrupt
    assert str(as_megatron_error(early.value)) == "interrupted (SIGINT); start the same command again"
    parts: Any = SimpleNamespace(engine=None, progress=SimpleNamespace(iteration=10))
    position.parts = parts
    with pytest.raises(KeyboardInterrupt) as interrupt, position.told_at_end():
        raise KeyboardInterrupt
    told = str(as_megatron_error(interrupt.value))
    assert told.startswith("interrupted (SIGINT); ") and text in told
    assert told.endswith("--exit-signal-handler to save when interrupted" if "give --save" in told else text)
    with pytest.raises(PeerLostError) as lost, position.told_at_end():
        raise RuntimeError("gloo/transport: Connection reset by peer")
    told = str(as_megatron_error(lost.value))
    assert text.split(", or --")[0] in told and "--exit-signal-handler" not in told


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


def test_an_error_of_all_ranks_is_printed_once_without_torchrun() -> None:
    """Two ranks started by hand, one of them late. Other errors are printed by each rank."""
    program = f"""
import sys, time; sys.path.insert(0, {str(REPOSITORY)!r})
from megatron.errors import ConfigError
from megatron.training.exit import run_as_program
def body():
    time.sleep(float(sys.argv[1]))
    raise ConfigError(sys.argv[2])
run_as_program(body)
"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, wait, text],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": port},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, (wait, text) in enumerate([("1", "--lr x: wrong"), ("0", "--lr x: wrong"), ("0", "--lr y: wrong")])
    ]
    said = [line for rank in ranks for line in rank.communicate(timeout=120)[1].splitlines()]
    assert [rank.returncode for rank in ranks] == [2, 2, 2]
    assert sorted(re.sub(r" \(rank \d\)", "", line) for line in said) == [
        "error: --lr x: wrong",
        "error: --lr y: wrong",
    ]


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

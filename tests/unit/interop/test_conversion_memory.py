"""A conversion needs about the memory of its largest tensor: another process watches what it allocates.

Only anonymous memory counts. The kernel may drop the pages of mapped files at any time.
"""

from __future__ import annotations

import json
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.config import ModelConfig
from megatron.interop.hf.export import plan_export, write_export
from megatron.model.parameters import parameters
from tests.helpers.megatron_lm import Layout, Model, with_moments
from tests.helpers.megatron_lm import write as write_megatron
from tests.helpers.other_programs import find_checkpoint
from tests.helpers.torch_dist import write as write_torch_dist
from tests.unit.checkpoint.support import one_process
from tests.unit.interop.megatron_lm.test_step import LLAMA

ROWS = 512
CONSTANT = 8 * 2**20  # and two copies of the largest: of one that is put together, and of its parts
SCRIPT = """
import contextlib, io, json, sys
from megatron.cli import convert_checkpoint as convert_cli
from megatron.interop import conversion

made = conversion.Reading.tensor
kept = []

def holding(reading, name, shape, dtype, read):  # planted: what was read is not let go of
    return made(reading, name, shape, dtype, lambda: (kept.append(read().clone()), kept[-1])[1])

for line in sys.stdin:
    plant, arguments = json.loads(line)
    conversion.Reading.tensor = {"": made, "holding": holding}[plant]
    with contextlib.redirect_stdout(io.StringIO()):
        assert convert_cli.main(arguments) == 0
    kept.clear()
    print("done", flush=True)
"""


def model(layers: int, hidden: int, ffn: int) -> Model:
    settings = {**LLAMA, "ffn_hidden_size": ffn}
    config = ModelConfig(num_layers=layers, hidden_size=hidden, num_attention_heads=4, **settings)
    args = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": 4, "kv_channels": hidden // 4}
    args |= {"layernorm_epsilon": 1e-6, **settings}
    args.pop("norm_epsilon")
    weights = {n: torch.randn(p.stored_shape) for n, p in parameters(config, ROWS).items()}
    shape = {"layers": layers, "heads": 4, "groups": 2, "width": hidden // 4}
    return Model(weights=weights, gated=True, tied=False, args=args, **shape)


class Watched:
    """A process that converts, observed from this one."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", SCRIPT]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def most(self, plant: str, load: Path, save: Path, to: str = "native") -> int:
        """Peak memory of the conversion, in bytes above what the process had before."""
        before = self._now()
        arguments = ["--load", str(load), "--to", to, "--save", str(save)]
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([plant, arguments]), file=self._process.stdin, flush=True)
        most = before
        while not self._said_done():
            most = max(most, self._now())
        assert save.exists()
        return most - before

    def _now(self) -> int:
        found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{self._process.pid}/status").read_text())
        assert found is not None and self._process.poll() is None
        return int(found[1]) * 1024

    def _said_done(self) -> bool:
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], 0.001)[0]) and bool(self._process.stdout.readline())

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def sources(folder: Path, saved: Model) -> dict[str, Path]:
    """The same model in three formats."""
    found = {name: folder / name for name in ("classic", "torch_dist", "hf")}
    write_megatron(found["classic"], with_moments(saved), Layout(tp=2, pp=2, names="core", optimizer="fp32"))
    write_torch_dist(found["torch_dist"], saved, tp=2)
    step = find_checkpoint(found["classic"], parallel=one_process(), log=lambda text: None)
    assert step is not None
    write_export(plan_export(step), found["hf"], log=lambda text: None)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted by /proc")
def test_memory_is_that_of_the_largest_tensor(tmp_path: Path) -> None:
    small, large = sources(tmp_path / "small", model(2, 32, 64)), sources(tmp_path / "large", model(12, 256, 1024))
    largest = 2 * 256 * 1024 * 4  # gate and up
    bound, weights = 2 * largest + CONSTANT, (large["hf"] / "model.safetensors").stat().st_size
    watched = Watched()
    try:
        for name, path in small.items():  # what is imported stays
            watched.most("", path, tmp_path / f"small {name}")
        needed = {name: watched.most("", path, tmp_path / f"large {name}") for name, path in large.items()}
        imported = tmp_path / "large classic"
        watched.most("", tmp_path / "small classic", tmp_path / "small to megatron", "megatron")
        needed["to megatron"] = watched.most("", imported, tmp_path / "to megatron", "megatron")
        planted = watched.most("holding", large["hf"], tmp_path / "planted")
    finally:
        watched.end()
    assert all(most < bound for most in needed.values()), (bound, needed)
    assert planted > 0.8 * weights > 2 * bound, (bound, weights, planted)

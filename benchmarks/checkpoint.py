"""Compares saving and loading a checkpoint, synchronous and asynchronous, with torch and the disk.

    python benchmarks/checkpoint.py --folder /fast/disk        # 1024 MB, five rounds
    python benchmarks/checkpoint.py --megabytes 16 --rounds 1

The state is Adam's for bf16 weights, in one process: weights, fp32 masters, two moments. All contenders end with fsync
and take turns. "of raw" is the raw file's time over theirs, as the median over rounds.

    raw file             the same bytes from one buffer; reading hashes them while they are in the cache
    torch.save           one file
    ours                 save_checkpoint and load_checkpoint, with checksums and the commit
    ours, async          --async-save: time that training waits, and time until the commit
    DCP, DCP async       torch.distributed.checkpoint, without checksums

Reading is from the page cache, unless the files exceed the memory. All but torch.load read into allocated memory, like
that of a model and an optimizer.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.parts.turns import rotated
from megatron.checkpoint import storage
from megatron.checkpoint.background import Background
from megatron.checkpoint.found_step import find_checkpoint
from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.run_state import Retention, RunHistory, Sharded, TrainState
from megatron.checkpoint.save import Save, save_checkpoint
from megatron.distributed.parallel_state import ParallelState
from megatron.layout import Layout
from megatron.state.shard import Shard

CPU = torch.device("cpu")
BYTES_PER_ELEMENT = 14
ROWS = COLUMNS = 1024
Times = dict[str, float]


class State:
    def __init__(self, megabytes: int) -> None:
        count = max(megabytes * 2**20 // (BYTES_PER_ELEMENT * ROWS * COLUMNS), 1)
        self.masters = {f"blocks.{n}.weight": torch.rand(ROWS, COLUMNS) for n in range(count)}
        self.weights = {name: master.bfloat16() for name, master in self.masters.items()}
        self.moments = {
            name: (torch.rand_like(master), torch.rand_like(master)) for name, master in self.masters.items()
        }
        self.size = count * BYTES_PER_ELEMENT * ROWS * COLUMNS
        self.parallel = ParallelState.build(Layout(1), 0)
        self.memory = torch.ones(self.size, dtype=torch.uint8)

    def target(self) -> dict[str, Tensor]:
        """Returns the tensors of `flat`, in the memory that all contenders load into."""
        found, place = {}, 0
        for name, tensor in self.flat().items():
            found[name] = self.memory[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place += tensor.nbytes
        return found

    def flat(self) -> dict[str, Tensor]:
        found = {f"weight/{name}": tensor for name, tensor in self.weights.items()}
        found |= {f"master/{name}": tensor for name, tensor in self.masters.items()}
        for name, moments in self.moments.items():
            found |= {f"{kind}/{name}": moment for kind, moment in zip(("m", "v"), moments, strict=True)}
        return found

    def params(self, tensors: dict[str, Tensor]) -> dict[str, Sharded]:
        return {name: (Shard(name, (ROWS, COLUMNS)), tensor) for name, tensor in tensors.items()}

    def ours(self) -> TrainState:
        params = self.params(self.weights)
        optimizer = {
            name: {
                kind: (params[name][0], tensor)
                for kind, tensor in zip(("master", "exp_avg", "exp_avg_sq"), (master, *self.moments[name]), strict=True)
            }
            for name, master in self.masters.items()
        }
        return TrainState(params=params, config={}, iteration=1, optimizer=optimizer)


def synced(path: Path, write: Callable[[Any], object]) -> None:
    with open(path, "xb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def raw(state: State, folder: Path) -> Times:
    buffer, path = memoryview(bytearray(os.urandom(2**20)) * (state.size // 2**20)), folder / "raw"
    saved = seconds(lambda: synced(path, lambda file: file.write(buffer)))
    return {"save": saved, "load": seconds(lambda: read_hashed(path, state.memory))}


def read_hashed(path: Path, memory: Tensor) -> None:
    target, hasher = memory.numpy().data, storage.FileHasher(storage.HASH)
    with open(path, "rb", buffering=0) as file:
        done = 0
        while read := file.readinto(target[done : done + 2**20]) or 0:
            hasher.update(target[done : done + read])
            done += read
    assert done == memory.nbytes


def torch_save(state: State, folder: Path) -> Times:
    path, content = folder / "one.pt", state.flat()
    saved = seconds(lambda: synced(path, lambda file: torch.save(content, file)))
    return {"save": saved, "load": seconds(lambda: torch.load(path, weights_only=True))}


def load_ours(state: State, folder: Path) -> None:
    found = find_checkpoint(folder, parallel=state.parallel, hash_later=True)
    assert found is not None
    target = state.target()
    params = state.params({name: target[f"weight/{name}"] for name in state.weights})
    places = (("master", "master"), ("m", "exp_avg"), ("v", "exp_avg_sq"))
    own = {name: {kind: target[f"{place}/{name}"] for place, kind in places} for name in state.weights}
    loaded = load_checkpoint(found, parallel=state.parallel, params=params, own=own, load_rng=False)
    assert loaded.optimizer is not None
    for name, kinds in own.items():  # as in an optimizer: tensors that were loaded into other memory are copied
        for kind, tensor in kinds.items():
            if loaded.optimizer[name][kind] is not tensor:
                tensor.copy_(loaded.optimizer[name][kind])


def ours(state: State, folder: Path) -> Times:
    with closing(RunHistory("benchmark")) as history:
        given = state.ours()
        saved = seconds(
            lambda: save_checkpoint(folder, given, parallel=state.parallel, save_tokenizer=None, history=history)
        )
    return {"save": saved, "load": seconds(lambda: load_ours(state, folder))}


class OursInBackground:
    """Asynchronous saves. Their memory is kept between saves, as in a run; the first save is not measured."""

    def __init__(self, state: State) -> None:
        self._background = Background(state.parallel, CPU, later=False)

    def __call__(self, state: State, folder: Path) -> Times:
        with closing(RunHistory("benchmark")) as history:
            save = Save(folder, state.ours(), state.parallel, history, None, {})
            started = time.perf_counter()
            self._background.start(save, Retention())
            blocked = time.perf_counter() - started
            self._background.finish()
            return {"save": time.perf_counter() - started, "blocked": blocked}


def dcp_save(state: State, folder: Path) -> Times:
    content = state.flat()
    saved = seconds(lambda: dcp.save(content, checkpoint_id=folder / "dcp"))
    return {"save": saved, "load": seconds(lambda: dcp.load(state.target(), checkpoint_id=folder / "dcp"))}


def dcp_async(state: State, folder: Path) -> Times:
    started = time.perf_counter()
    future: Any = dcp.async_save(
        state.flat(), checkpoint_id=folder / "dcp", async_checkpointer_type=AsyncCheckpointerType.THREAD
    )
    blocked = time.perf_counter() - started
    future.result()
    return {"save": time.perf_counter() - started, "blocked": blocked}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="folder to write in (default: the system's temporary folder)")
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    state = State(args.megabytes)
    contenders: dict[str, Callable[[State, Path], Times]] = {
        "raw file": raw,
        "torch.save": torch_save,
        "ours": ours,
        "ours, async": OursInBackground(state),
        "DCP": dcp_save,
        "DCP async": dcp_async,
    }
    rounds = measured(state, contenders, args.rounds, args.folder)
    dist.destroy_process_group()
    show(state, rounds)


def measured(
    state: State, contenders: dict[str, Callable[[State, Path], Times]], rounds: int, folder: Path | None
) -> dict[str, list[Times]]:
    """Measures `rounds` rounds, after a first one that is not counted."""
    found: dict[str, list[Times]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name in rotated(list(contenders), number):
            place = Path(tempfile.mkdtemp(dir=folder))
            try:
                times = contenders[name](state, place)
            finally:
                shutil.rmtree(place)
                os.sync()  # pending writes of one contender must not slow the next
            if number:
                found[name].append(times)
    return found


def show(state: State, rounds: dict[str, list[Times]]) -> None:
    columns = f"{'save s':>8} {'of raw':>7} {'load s':>8} {'of raw':>7} {'blocked s':>10} of ours"
    print(f"{state.size / 1e6:7.0f} MB {'':10} {columns}")
    for name, taken in rounds.items():
        cells = [f"{name:20}"]
        for what in ("save", "load"):
            ratios = [raw[what] / own[what] for raw, own in zip(rounds["raw file"], taken, strict=True) if what in own]
            times = [own[what] for own in taken if what in own]
            cells.append(f"{statistics.median(times):8.3f} {statistics.median(ratios):7.2f}" if times else " " * 16)
        if "blocked" in taken[0]:
            ratios = [own["blocked"] / ours["save"] for ours, own in zip(rounds["ours"], taken, strict=True)]
            blocked = statistics.median(own["blocked"] for own in taken)
            cells.append(f"{blocked:10.3f} {statistics.median(ratios):7.2f}")
        print(" ".join(cells))


if __name__ == "__main__":
    main()

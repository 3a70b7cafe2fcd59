"""Random streams: the seeds of each rank, and generator states as plain values.

Only dropout (and users' own code) draws from these generators. Initial weights come from a generator per parameter
name, and the sample order from a generator of the data, so neither depends on the rank.

Ranks of one tensor-parallel group start with the same stream, because they hold copies of the same activations. Data-,
context- and pipeline-parallel ranks have different ones: they see other tokens or compute other layers, and a common
mask would correlate their dropout. (Megatron gives data-parallel ranks one stream unless `--data-parallel-random-init`
is set.)
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from megatron.distributed.parallel_state import Axis
from megatron.layout import Coordinates

CPU = torch.device("cpu")

RngState = dict[str, Any]
"""Generator states as plain numbers and uint8 tensors only, so that `torch.load(weights_only=True)` accepts them."""


def stream_seed(seed: int, *names: int | str) -> int:
    """63-bit seed of the stream called `names`; streams with different names are independent."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def rank_seed(seed: int, place: Coordinates) -> int:
    """Seed of one rank's default generators; tensor-parallel ranks share it."""
    return stream_seed(seed, "default", place.dp, place.cp, place.pp)


def seed_rank(seed: int, place: Coordinates) -> int:
    """Seeds Python's, numpy's and torch's generators (of every device) for this rank, and returns the seed."""
    value = rank_seed(seed, place)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
    return value


def get_rng_state(device: torch.device = CPU) -> RngState:
    """States of all generators that a step may draw from."""
    version, words, gauss = random.getstate()
    numpy: dict[str, Any] = np.random.get_state(legacy=False)
    state: RngState = {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "kind": str(numpy["bit_generator"]),
            "key": torch.from_numpy(numpy["state"]["key"].view(np.uint8).copy()),
            "position": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "cached_gauss": float(numpy["gauss"]),
        },
        "torch_cpu": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state["accelerator"] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_rng_state(state: RngState, device: torch.device = CPU) -> None:
    """Restores all generators to a state that `get_rng_state` returned."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    key = np.frombuffer(numpy["key"].numpy().tobytes(), dtype=np.uint32)
    np.random.set_state((numpy["kind"], key, numpy["position"], numpy["has_gauss"], numpy["cached_gauss"]))
    try:
        torch.set_rng_state(state["torch_cpu"].cpu())
        if device.type != "cpu" and "accelerator" in state:
            torch.get_device_module(device).set_rng_state(state["accelerator"].cpu(), device)
    except RuntimeError as error:  # bytes that are not a generator's state
        raise ValueError(str(error)) from error


class SplitRandom:
    """Separate random stream for each rank of an axis, for dropout on tensors that are split over the axis.

    Inside `with stream.fork():` the default generator draws from that stream. Afterwards it continues as without the
    fork, equal on all ranks. The fork's seed is drawn from the default generator, so there is no other state: restoring
    that generator, for recomputation or a resume, restores the stream too.
    """

    def __init__(self, axis: Axis, device: torch.device = CPU) -> None:
        self._axis, self._device = axis, device

    @contextmanager
    def fork(self) -> Iterator[None]:
        if self._axis.size == 1:
            yield
            return
        generator = default_generator(self._device)
        seed = stream_seed(next_seed(generator), self._axis.name, self._axis.rank)
        state = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(state)


def default_generator(device: torch.device) -> torch.Generator:
    """Default generator of torch on this device."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    return module.default_generators[module.current_device() if device.index is None else device.index]


def next_seed(generator: torch.Generator) -> int:
    """Draws a seed from the generator, which advances. No host sync: an accelerator's state is on the host."""
    if generator.device.type == "cpu":
        return int(torch.randint(2**62, (), generator=generator).item())
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # philox counts in fours
    return stream_seed(generator.initial_seed(), "fork", offset)

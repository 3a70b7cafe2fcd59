"""Random streams: how each rank is seeded, and the generators' states as plain values.

Only dropout (and what users draw in their own code) uses these generators. The initial weights come from a generator
per parameter name, and the sample order from one of the data's own, so neither depends on the rank.

Ranks of one tensor-parallel group start from the same stream, because they hold copies of the same activations.
Data-, context- and pipeline-parallel ranks each have their own: they see other tokens or compute other layers, and
one mask for all of them would correlate their dropout. (Megatron gives data-parallel ranks one stream unless
`--data-parallel-random-init` is set.)
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from megatron.layout import Coordinates

RngState = dict[str, Any]
"""Plain numbers and uint8 tensors only, so that `torch.load(weights_only=True)` admits it."""


def stream_seed(seed: int, *names: int | str) -> int:
    """A 63-bit seed for the stream called `names`: streams with different names are unrelated."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def rank_seed(seed: int, place: Coordinates) -> int:
    """The seed of one rank's default generators; tensor-parallel ranks share it."""
    return stream_seed(seed, "default", place.dp, place.cp, place.pp)


def seed_rank(seed: int, place: Coordinates) -> int:
    """Seeds Python's, numpy's and torch's generators (of every device) for this rank, and returns the seed used."""
    value = rank_seed(seed, place)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
    return value


def get_rng_state(device: torch.device | str = "cpu") -> RngState:
    """The state of every generator that a step may draw from."""
    device = torch.device(device)
    version, words, gauss = random.getstate()
    numpy: dict[str, Any] = np.random.get_state(legacy=False)
    state: RngState = {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "kind": str(numpy["bit_generator"]),
            "key": _to_bytes(numpy["state"]["key"]),
            "position": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "cached_gauss": float(numpy["gauss"]),
        },
        "torch_cpu": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state["accelerator"] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_rng_state(state: RngState, device: torch.device | str = "cpu") -> None:
    """Puts every generator back to where `get_rng_state` saw it."""
    device = torch.device(device)
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    key = np.frombuffer(numpy["key"].numpy().tobytes(), dtype=np.uint32)
    np.random.set_state((numpy["kind"], key, numpy["position"], numpy["has_gauss"], numpy["cached_gauss"]))
    torch.set_rng_state(state["torch_cpu"].cpu())
    if device.type != "cpu" and "accelerator" in state:
        torch.get_device_module(device).set_rng_state(state["accelerator"].cpu(), device)


def _to_bytes(array: np.ndarray) -> torch.Tensor:
    return torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)

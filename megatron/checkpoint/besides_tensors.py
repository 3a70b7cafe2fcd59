"""Plain values of a checkpoint besides the model's and the optimizer's tensors: counters, schedules, random states.
They are stored twice: in each `.pt` file, for other programs, and in a `.state.json` file beside it, which a load
reads."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from megatron.errors import CheckpointError, MegatronError
from megatron.torch_files.torch_file import dtype_named
from megatron.utils.dtype import resolved


def values_file(file: str) -> str:
    """Name of the file with the plain values of a `.pt` file."""
    return PurePosixPath(file).with_suffix(".state.json").as_posix()


def values_of_file(content: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the values of a `.pt` file that its `.state.json` also has. The `extra` of a user's script may have any
    size, so only the `.pt` file has it. If there is no `extra`, the entry is None, so that a load need not open the
    `.pt` file."""
    found = {key: content[key] for key in ("iteration", "opt_param_scheduler", "rng_state") if key in content}
    found["optimizer"] = {"extra": (content["optimizer"] or {}).get("extra")}
    return found if "extra" in content else {**found, "extra": None}


def encode_values(values: Mapping[str, Any]) -> bytes:
    """Encodes values as JSON. Tensors are small and are in a separate list, each with its path of keys."""
    tensors: list[dict[str, Any]] = []

    def plain(value: Any, key: tuple[str | int, ...]) -> Any:
        if isinstance(value, Tensor):
            data = resolved(value).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            tensors.append({"key": key, "dtype": str(value.dtype), "shape": list(value.shape), "hex": data.hex()})
            return None
        if isinstance(value, Mapping):
            return {name: plain(item, (*key, name)) for name, item in value.items()}
        if isinstance(value, list):
            return [plain(item, (*key, number)) for number, item in enumerate(value)]
        return value

    body = {"values": plain(values, ()), "tensors": tensors}
    return json.dumps(body).encode() + b"\n"


def read_values(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_bytes())
        values: dict[str, Any] = dict(body["values"])
        for each in body["tensors"]:
            *way, last = each["key"]
            branch = values
            for part in way:
                branch = branch[part]
            branch[last] = _tensor(each)
        return values
    except (OSError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(
            f"{path} cannot be read as the plain values of a checkpoint ({reason}); use another checkpoint"
        ) from error


def _tensor(described: Mapping[str, Any]) -> Tensor:
    data, dtype, shape = bytearray.fromhex(described["hex"]), dtype_named(described["dtype"]), described["shape"]
    if prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for a tensor of shape {shape} and {dtype}")
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


@contextmanager
def saved_values(what: str, step: Path, way_out: str) -> Iterator[None]:
    """Turns errors from reading or restoring a checkpoint's plain values into a CheckpointError that names `what` and
    `step`. Such errors are possible although checksums match: a forger can compute the checksums of forged values. A
    RuntimeError is not caught, because a lost peer may have caused it."""
    try:
        yield
    except MegatronError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(f"{step}: its {what} cannot be restored ({reason}); {way_out}") from error

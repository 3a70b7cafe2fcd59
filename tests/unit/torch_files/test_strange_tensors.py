"""torch files with untrusted tensor descriptions: every value is read, or rejected in one line."""

from __future__ import annotations

import io
import pickle
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron.torch_files.torch_file import TorchFile
from tests.helpers.mutations import WRONG, only_our_errors

STORAGE = ("storage", torch.FloatStorage, "0", "cpu", 6)
ARGUMENTS = ["STORAGE", 0, (2, 3), (3, 1), False, None]
ODD: tuple[Any, ...] = (
    *(value for value in WRONG if value != "\ud800"),
    *((), (1,), (2, 3), (3, 2), (0,), (-1, 3), (2**47, 2**47), (1,) * 64, (1,) * 65, (2**47,) * 1000, (2.0, 3.0)),
    *((True, 3), ("2", 3), (None,), ((2, 3), 1), b"\x00", torch.float32, torch.quint4x2, torch.nn.Linear, "STORAGE"),
)


class Described:
    """A tensor, described by the arguments of torch's loader."""

    def __init__(self, call: Any, arguments: tuple[Any, ...]) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


class Pickler(pickle.Pickler):
    storage: Any = STORAGE

    def persistent_id(self, value: Any) -> Any:
        return self.storage if isinstance(value, str) and value == "STORAGE" else None


def written(path: Path, call: Any, arguments: list[Any], storage: Any) -> Path:
    stream = io.BytesIO()
    pickler = Pickler(stream, protocol=2)
    pickler.storage = storage
    pickler.dump({"weight": Described(call, tuple(arguments))})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", stream.getvalue())
        archive.writestr("x/data/0", b"\x00\x00\x80\x3f" * 6)
    return path


def damaged(count: int, seed: int) -> Iterator[tuple[Any, list[Any], Any]]:
    choose = random.Random(seed)
    calls = (torch._utils._rebuild_tensor_v2, torch._utils._rebuild_tensor_v3, torch._utils._rebuild_parameter)
    for place, value in [(place, value) for place in range(len(ARGUMENTS)) for value in ODD]:
        yield calls[0], [*ARGUMENTS[:place], value, *ARGUMENTS[place + 1 :]], STORAGE
    for _ in range(count):
        arguments, storage = list(ARGUMENTS), list(STORAGE)
        for _ in range(choose.choice((1, 2))):
            changed = choose.choice((arguments, storage))
            odd = choose.choice(ODD if changed is arguments else ODD[:-1])
            changed[choose.randrange(len(changed))] = odd
        if choose.random() < 0.2:
            del arguments[choose.randrange(len(arguments)) :]
        arguments += [choose.choice(ODD) for _ in range(choose.choice((0, 0, 1, 2)))]
        yield choose.choice(calls), arguments, tuple(storage)


def test_tensors_of_any_description(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"

    def read(given: tuple[Any, list[Any], Any]) -> None:
        file = TorchFile.open(written(path, *given), None)
        value = file.content["weight"]
        if file.is_tensor(value):
            file.shape(value), file.dtype(value), file.place(value), file.tensor(value).to(torch.complex64)

    read((torch._utils._rebuild_tensor_v2, ARGUMENTS, STORAGE))
    taken, refused = only_our_errors(read, damaged(400, 26))
    assert taken and refused

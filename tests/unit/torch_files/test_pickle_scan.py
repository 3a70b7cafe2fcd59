"""A file of a few hundred bytes can neither hang the reader nor fill its memory."""

from __future__ import annotations

import pickle
import random
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.errors import CheckpointError
from megatron.torch_files import safe_load
from megatron.torch_files.pickle_instructions import PickleRefused, in_bytes, in_stream
from megatron.torch_files.pickle_scan import scan

PROTO, STOP = b"\x80\x02", b"."


def put(n: int) -> bytes:
    return b"q" + bytes([n])


def get(n: int) -> bytes:
    return b"h" + bytes([n])


def doubled(levels: int, leaf: bytes, make: Callable[[bytes], bytes]) -> bytes:
    """Nests `levels` values, each of which holds the previous one twice."""
    code = leaf + put(0)
    for level in range(levels):
        code += make(get(level) * 2) + put(level + 1)
    return code


ATTACKS = {
    "a list that contains itself": (b"]" + put(0) + get(0) + b"a", "contains itself"),
    "a list that contains itself through a dict": (b"]" + put(0) + b"}" + b"K\x01" + get(0) + b"sa", "contains itself"),
    "a list shared over 60 levels": (doubled(60, b"]", lambda two: b"](" + two + b"e"), "have over 1000000 parts"),
    "a tuple shared over 60 levels": (doubled(60, b")", lambda two: two + b"\x86"), "have over 1000000 parts"),
    "a key that takes for ever to hash": (
        b"}" + doubled(60, b"K\x01", lambda two: two + b"\x86") + b"K\x01s",
        "have over 1000000 parts",
    ),
    "a list that is filled after it was shared": (b"]" + put(0) + get(0) + b"K\x01a", "changes after its use"),
    "a byte array of 3 GB": (b"c__builtin__\nbytearray\nJ\x00\x00\x00\x7f\x85R", "refers to builtins.bytearray"),
    "a counter": (b"ccollections\nCounter\n)R", "refers to collections.Counter"),
    "a meta tensor": (b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n)R", "_rebuild_meta_tensor_no_storage"),
    "code": (b"cos\nsystem\nX\x04\x00\x00\x00true\x85R", "refers to os.system"),
    "integers of one hash": (
        b"(" + b"".join(b"\x8a\x0b" + ((2**61 - 1) * n << 8).to_bytes(11, "little") for n in range(1, 1100)) + b"t",
        "many of more than 8 bytes",
    ),
    "tuples of one hash": (
        b"}(" + b"".join(b"J" + struct.pack("<i", n) + b"K\x02\x86N" for n in range(5001)) + b"u",
        "more than 5000 keys",
    ),
    "a set of a tensor": (
        b"c__builtin__\nset\nctorch._utils\n_rebuild_tensor_v2\n(tR\x85R",
        "creates a set from something that is not a list",
    ),
    "a storage of 2 GB": (b"ctorch.storage\nUntypedStorage\nJ\x00\x00\x00\x7f\x85R", "creates a torch.storage.Untyped"),
    "a very long integer": (b"\x8a\x50" + (2**600).to_bytes(80, "little"), "over 64 bytes"),
    "deep nesting": (b"]" * 200 + b"a" * 199, "more than 100 deep"),
    "an empty stack": (b"a", "malformed"),
    "a mark that is missing": (b"]e", "malformed"),
    "something never stored": (get(7), "malformed"),
    "no end": (b"]" * 3, None),
    "persistent identifiers of text": (b"Pfoo\n", "has the instruction PERSID"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_are_refused_before_anything_is_built(attack: str, tmp_path: Path) -> None:
    code, said = ATTACKS[attack]
    data = PROTO + code + (STOP if said else b"")
    with pytest.raises(PickleRefused, match=said):
        scan(data, ())
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", data)
        archive.writestr("x/version", "3\n")
    with pytest.raises(CheckpointError, match="cannot be read as plain weights"):
        safe_load.load_file(path)


def roundtrip(content: Any, path: Path) -> Any:
    torch.save(content, path)
    return safe_load.load_file(path)


def test_what_checkpoints_hold_is_read(tmp_path: Path) -> None:
    shared, betas = torch.randn(3), (0.9, 0.95)
    content = {
        "tensors": {
            str(dtype): torch.zeros(2, 3).to(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.bool)
        },
        "unsigned": torch.zeros(2, dtype=torch.uint16),
        "tied": [shared, shared],
        "view": torch.randn(4, 6)[1:3, ::2],
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "groups": [{"betas": betas, "lr": 1e-4, "params": list(range(3000))} for _ in range(5)],
        "plain": [None, True, -1, 2**40, -(2**63), 1e300, "ä", (), {}, set(), {1, 2}, [[[]]]],
        "torch": [torch.float32, torch.Size([1, 2]), torch.device("cpu"), torch.nn.Linear(2, 2).state_dict()],
    }
    found = roundtrip(content, tmp_path / "x.pt")
    assert found["groups"] == content["groups"] and found["plain"] == content["plain"]
    assert torch.equal(found["view"], content["view"]) and torch.equal(found["tied"][1], shared)
    assert found["torch"][:3] == content["torch"][:3]


def test_a_tensor_that_repeats_its_elements_is_refused(tmp_path: Path) -> None:
    """Copying four such bytes could make a tensor of any size."""
    with pytest.raises(CheckpointError, match="holds a tensor that is larger than its storage"):
        roundtrip(torch.zeros(1).expand(10**12), tmp_path / "x.pt")
    assert torch.equal(roundtrip(torch.arange(4)[::2], tmp_path / "y.pt"), torch.tensor([0, 2]))


def test_damaged_pickles_are_read_or_refused_in_bounded_time(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.randn(4), "b": [(1, "two"), {"c": 3.0}], "d": torch.zeros(2, dtype=torch.bfloat16)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    pickled = next(name for name in members if name.endswith("data.pkl"))
    rng = random.Random(11)
    refused = 0
    for _ in range(400):
        data = bytearray(members[pickled])
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.choice((rng.randrange(256), *b"]}(aesubR0h\x86\x85"))
        with zipfile.ZipFile(path, "w") as archive:
            for name, old in members.items():
                archive.writestr(name, bytes(data) if name == pickled else old)
        try:
            safe_load.load_file(path)
        except CheckpointError:
            refused += 1
    assert 200 < refused < 400


def test_every_instruction_of_pickle_is_followed_or_refused() -> None:
    """torch does not write pickles of protocol 4 or 5; they are rejected, not misread."""
    for protocol in (0, 1, 3, 4, 5):
        with pytest.raises(PickleRefused):
            scan(pickle.dumps({"a": [1, (2, b"x")], "b": {3}}, protocol), ())
    scan(pickle.dumps({"a": [1, (2, "x")], "b": {3}, "c": -(2**33), "d": struct.calcsize("q")}, 2), ())


@pytest.mark.parametrize("protocol", range(6))
def test_instructions_are_those_of_pickletools(protocol: int) -> None:
    """Covers whole, truncated and damaged pickles: both scanners fail, or neither."""
    draw = random.Random(protocol)
    content = {"a": [1, 300, 70_000, -1, 2**70, 1.5, None, True, "text \udc80", b"bytes"], ("b",): {"c": "x" * 300}}
    whole = pickle.dumps([content, content, list(range(600)), OrderedDict(), str(draw.random())], protocol)
    for _ in range(300):
        data = bytearray(whole[: draw.choice([len(whole), draw.randrange(len(whole))])])
        if data and draw.random() < 0.7:
            data[draw.randrange(len(data))] = draw.randrange(256)
        both = []
        for instructions in (in_bytes, lambda data: in_stream(BytesIO(data))):
            found: list[object] = []
            try:
                found.extend(instructions(bytes(data)))
            except Exception:
                found.append("an error")
            both.append(found)
        assert repr(both[0]) == repr(both[1])

"""The checksums of a checkpoint cover every byte once, are named in its manifest, and are readable in every schema."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint import manifest, storage
from megatron.checkpoint.verify import inspect_step
from tests.unit.checkpoint.support import make_state, save

EARLIER = Path(__file__).parents[2] / "golden" / "checkpoint"  # schema 1
STEP = "iter_0000010"


def refusal_of_schema_1(raw: bytes) -> str:
    """First checks of the schema 1 reader, copied with their messages."""
    path = "manifest.json"
    outer = json.loads(raw)
    body = outer["manifest"]
    if raw != canonical(outer) or hashlib.sha256(canonical(body)).hexdigest() != outer["sha256"]:
        return f"{path} does not match its own checksum: it was damaged or edited"
    if body["schema"] != 1:
        return f"{path} has schema {body['schema']}; this version reads 1"
    return ""


def canonical(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=True, allow_nan=False) + "\n").encode()


def test_a_program_of_schema_1_refuses_a_newer_checkpoint_by_name(tmp_path: Path) -> None:
    save(tmp_path, make_state())
    assert refusal_of_schema_1((EARLIER / STEP / "manifest.json").read_bytes()) == ""
    found = refusal_of_schema_1((tmp_path / STEP / "manifest.json").read_bytes())
    assert found == "manifest.json has schema 4; this version reads 1"


def test_a_newer_schema_and_an_unknown_hash_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, make_state())
    path = tmp_path / STEP / "manifest.json"
    body = json.loads(path.read_bytes())["manifest"]
    for change, words in (
        ({"schema": 5}, "has schema 5; this version reads 1 to 4"),
        ({"hash": "blake9"}, "has blake9 checksums; this version knows xxh3_128, sha256"),
    ):
        edited = {**body, **change}
        digest = hashlib.sha256(canonical(edited)).hexdigest()
        with pytest.raises(manifest.BrokenManifestError, match=words):
            manifest.decode(canonical({"manifest": edited, "sha256": digest}), path)


def test_a_damaged_block_is_found_in_both_schemas(tmp_path: Path) -> None:
    save(tmp_path / "new", make_state())
    shutil.copytree(EARLIER, tmp_path / "old")
    for name, algorithm in (("new", "xxh3_128"), ("old", "sha256")):
        step = tmp_path / name / STEP
        record, problems = inspect_step(step)
        assert record is not None and record.hash == algorithm and not problems
        damaged = step / "mp_rank_00/model_optim_rng.pt"
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
        (problem,) = inspect_step(step)[1]
        assert problem.kind == "corrupt" and "first between bytes 0 and 16777216 (1 of 1 blocks)" in problem.text


def test_the_hash_is_the_published_one(tmp_path: Path) -> None:
    """Uses the specification's value for no bytes, and checks where blocks begin."""
    assert storage.HASHES["xxh3_128"]().hexdigest() == "99aa06d3014798d86001c324468d497f"
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * storage.BLOCK_BYTES) + b"end")
    blocks = storage.hash_file(path).blocks
    hasher = storage.HASHES["xxh3_128"]()
    hasher.update(memoryview(b"end"))
    assert len(blocks) == 3 and blocks[0] == blocks[1] and blocks[2] == hasher.hexdigest()


def test_every_byte_is_hashed_once_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    class Counting:
        def update(self, data: memoryview, /) -> None:
            hashed.append(len(data))

        def hexdigest(self) -> str:
            return "0"

    monkeypatch.setattr(storage, "HASHES", {storage.HASH: Counting})
    save(tmp_path, make_state())
    files = [path for path in (tmp_path / STEP).rglob("*") if path.is_file()]
    assert sum(hashed) == sum(path.stat().st_size for path in files)


def test_threads_hash_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers any range of blocks, including the short last one and blocks beyond the end of the file."""
    monkeypatch.setattr(storage, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(storage, "_READ_BYTES", 300)
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 41)
    whole = storage.hash_file(path).blocks
    assert len(set(whole)) == len(whole) == 11
    for first in range(11):
        for last in range(first, 14):
            for threads in (1, 2, 3, 16):
                found = storage.hash_blocks(path, range(first, last), storage.HASH, threads)
                assert found == whole[first:last], (first, last, threads)


def test_the_bytes_of_a_manifest_are_those_that_were_signed(tmp_path: Path) -> None:
    """The manifest is canonical JSON with its checksum inside; any byte added, removed or changed is rejected."""
    save(tmp_path, make_state())
    path = tmp_path / STEP / "manifest.json"
    raw = path.read_bytes()
    outer = json.loads(raw)
    digest = hashlib.sha256(canonical(outer["manifest"])).hexdigest()
    assert raw == canonical(outer) and outer["sha256"] == digest
    assert manifest.encode(manifest.decode(raw, path)) == raw
    for place in range(0, len(raw), len(raw) // 150):
        part, rest = raw[:place], raw[place:]
        for edited in (
            part + rest[1:],
            part + b" " + rest,
            part + b"\n" + rest,
            part + bytes([rest[0] ^ 1]) + rest[1:],
        ):
            with pytest.raises(manifest.BrokenManifestError):
                manifest.decode(edited, path)
    for old, new in ((b"\n  ", b"\n "), (b"\n  ", b"\n   "), (b'": ', b'":')):
        assert old in raw
        with pytest.raises(manifest.BrokenManifestError, match="does not match its own checksum"):
            manifest.decode(raw.replace(old, new, 1), path)

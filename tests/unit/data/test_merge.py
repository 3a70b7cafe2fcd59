"""Merging gives the files of a single run and refuses damaged inputs."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from megatron.cli.merge_datasets import main
from megatron.data.indexed.builder import IndexedDatasetBuilder
from megatron.data.indexed.dataset import IndexedDataset
from megatron.data.indexed.record import make_record, read_record, record_path, write_record
from megatron.data.merge import merge
from megatron.data.parts import find_prefixes, plan_groups
from megatron.errors import ConfigError, DataError, MegatronError

Document = list[list[int]]  # its sequences


def some_documents(seed: int, count: int) -> list[Document]:
    draw = random.Random(seed)
    return [
        [[draw.randrange(1000) for _ in range(draw.randrange(9))] for _ in range(draw.randrange(4))]
        for _ in range(count)
    ]


def write(
    prefix: Path, documents: list[Document], *, dtype: str = "uint16", record: bool = True, **changed: Any
) -> str:
    impl = changed.pop("impl", "mmap")
    with IndexedDatasetBuilder(prefix, dtype, impl=impl) as builder:
        for sequences in documents:
            builder.add_document([i for s in sequences for i in s], [len(s) for s in sequences])
    if record:
        facts: dict[str, Any] = {"tokenizer_fingerprint": "abc", "vocab_size": 1000, "eod_id": 9, "source": ("c.json",)}
        extra = {"append_eod": True, "json_key": "text"} | changed.pop("extra", {})
        top = max((i for d in documents for s in d for i in s), default=-1)
        write_record(prefix, make_record(prefix, max_id=top, extra=extra, **(facts | changed)))
    return str(prefix)


def write_parts(folder: Path, documents: list[Document], world: int, key: str = "text_document") -> list[str]:
    folder.mkdir(exist_ok=True)
    cut = [len(documents) * rank // world for rank in range(world + 1)]
    return [
        write(
            folder / f"corpus_part{rank:03d}_of_{world:03d}_{key}",
            documents[cut[rank] : cut[rank + 1]],
            extra={"partition": {"rank": rank, "world": world}, "settings": f"digest {rank}"},
        )
        for rank in range(world)
    ]


def run_merge(inputs: list[Path | str], output: Path, **options: Any) -> None:
    merge(plan_groups(find_prefixes([str(word) for word in inputs], str(output)), str(output)), **options)


def same_files(one: Path | str, other: Path | str) -> bool:
    return all(Path(f"{one}.{s}").read_bytes() == Path(f"{other}.{s}").read_bytes() for s in ("bin", "idx"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("world", [1, 2, 3, 12])
def test_partitions_become_the_single_run(tmp_path: Path, world: int) -> None:
    documents = some_documents(world, 10)  # 12 partitions of 10 documents: some are empty
    write(tmp_path / "single", documents)
    write_parts(tmp_path / "parts", documents, world)
    run_merge([tmp_path / "parts"], tmp_path / "merged")
    assert same_files(tmp_path / "single", tmp_path / "merged")
    assert read_record(tmp_path / "merged") == _without_settings(tmp_path / "single", world)
    assert names(tmp_path) == sorted(
        ["parts", *(f"{name}.{s}" for name in ("merged", "single") for s in ("bin", "idx", "meta.json"))]
    )


def _without_settings(prefix: Path, world: int) -> Any:
    """Drops the record's settings: those of a partition name its rank."""
    record = read_record(prefix)
    assert record is not None
    return dataclasses.replace(record, extra=record.extra | ({"settings": "digest 0"} if world == 1 else {}))


def test_order_is_that_of_the_ranks_and_not_of_the_names_given(tmp_path: Path) -> None:
    documents = some_documents(1, 10)
    write(tmp_path / "single", documents)
    parts = write_parts(tmp_path / "parts", documents, 3)
    run_merge([parts[2], parts[0], parts[1]], tmp_path / "merged")
    assert same_files(tmp_path / "single", tmp_path / "merged")


def test_swapped_parts_are_found(tmp_path: Path) -> None:
    parts = write_parts(tmp_path / "parts", some_documents(1, 10), 2)
    for suffix in ("bin", "idx", "meta.json"):
        first, second = (Path(f"{part}.{suffix}") for part in parts)
        first.rename(tmp_path / "aside")
        second.rename(first)
        (tmp_path / "aside").rename(second)
    with pytest.raises(DataError, match="the record says partition 1 of 2, but the file name says 0 of 2"):
        run_merge([tmp_path / "parts"], tmp_path / "merged")
    assert names(tmp_path) == ["parts"]


def test_any_datasets_by_name_or_as_given(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    lists = [some_documents(seed, 5) for seed in range(3)]
    prefixes = [write(tmp_path / "in" / name, docs) for name, docs in zip("bca", lists, strict=True)]
    write(tmp_path / "by_name", lists[2] + lists[0] + lists[1])
    run_merge([tmp_path / "in"], tmp_path / "m1")
    assert same_files(tmp_path / "by_name", tmp_path / "m1")
    run_merge([tmp_path / "in" / "[abc]"], tmp_path / "m2")
    assert same_files(tmp_path / "by_name", tmp_path / "m2")
    run_merge([f"{tmp_path / 'in'}/*.bin"], tmp_path / "m3")
    assert same_files(tmp_path / "by_name", tmp_path / "m3")
    write(tmp_path / "given", lists[0] + lists[1] + lists[2])
    run_merge(list(prefixes), tmp_path / "m4")
    assert same_files(tmp_path / "given", tmp_path / "m4")


def test_keys_become_an_output_each(tmp_path: Path) -> None:
    texts, titles = some_documents(1, 6), some_documents(2, 6)
    write_parts(tmp_path / "parts", texts, 2)
    write_parts(tmp_path / "parts", titles, 2, "title_document")
    write(tmp_path / "texts", texts)
    write(tmp_path / "titles", titles)
    run_merge([tmp_path / "parts"], tmp_path / "all")
    assert same_files(tmp_path / "all_text_document", tmp_path / "texts")
    assert same_files(tmp_path / "all_title_document", tmp_path / "titles")


@pytest.mark.parametrize("impl", ["lazy", "cached"])
def test_the_kind_of_index_is_kept_or_chosen(tmp_path: Path, impl: str) -> None:
    first, second = some_documents(1, 4), some_documents(2, 4)
    one, two = write(tmp_path / "1", first, impl=impl), write(tmp_path / "2", second, impl=impl)
    write(tmp_path / "old", first + second, impl=impl)
    write(tmp_path / "new", first + second)
    run_merge([one, two], tmp_path / "kept")
    assert same_files(tmp_path / "old", tmp_path / "kept") and IndexedDataset(tmp_path / "kept").legacy
    run_merge([one, two], tmp_path / "mapped", impl="mmap")
    assert same_files(tmp_path / "new", tmp_path / "mapped")
    run_merge([tmp_path / "old", tmp_path / "new"], tmp_path / "mixed")
    assert not IndexedDataset(tmp_path / "mixed").legacy


def test_only_empty_parts(tmp_path: Path) -> None:
    run_merge([write(tmp_path / "a", []), write(tmp_path / "b", [[]])], tmp_path / "m")
    assert (IndexedDataset(tmp_path / "m").num_documents, IndexedDataset(tmp_path / "m").num_tokens) == (1, 0)


def test_sources_are_joined_and_disagreements_left_out(tmp_path: Path) -> None:
    one = write(tmp_path / "1", some_documents(1, 2), source=("x", "y"), extra={"json_key": "text", "other": 1})
    two = write(tmp_path / "2", some_documents(2, 2), source=("y", "z"), extra={"json_key": "content"})
    run_merge([one, two], tmp_path / "m")
    record = read_record(tmp_path / "m")
    assert record is not None and record.source == ("x", "y", "z") and record.extra == {"append_eod": True}


# ---- refused, and nothing is written --------------------------------------------------------------------------


def refused(tmp_path: Path, inputs: list[Path | str], message: str, output: str = "merged", **options: Any) -> None:
    before = names(tmp_path)
    with pytest.raises(MegatronError, match=message) as raised:
        run_merge(inputs, tmp_path / output, **options)
    assert "\n" not in str(raised.value) and names(tmp_path) == before


def test_damaged_part_is_refused_by_name(tmp_path: Path) -> None:
    parts = write_parts(tmp_path / "parts", some_documents(1, 40), 4)
    path = Path(f"{parts[2]}.bin")
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    refused(
        tmp_path,
        [tmp_path / "parts"],
        rf"part002_of_004_text_document\.bin: damaged: block 0, bytes 0 to {len(content)}",
    )


def test_record_of_other_files_is_refused(tmp_path: Path) -> None:
    one, two = write(tmp_path / "1", some_documents(1, 4)), write(tmp_path / "2", some_documents(2, 4))
    record_path(two).write_bytes(record_path(one).read_bytes())
    refused(tmp_path, [one, two], r"2\.meta\.json: index_fingerprint: the record describes other")


def test_cut_part_is_refused(tmp_path: Path) -> None:
    one, two = write(tmp_path / "1", some_documents(1, 4)), write(tmp_path / "2", some_documents(2, 4))
    os.truncate(f"{two}.bin", 4)
    refused(tmp_path, [one, two], r"2\.bin: 4 bytes, but")


def test_missing_and_doubled_partitions(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    parts = write_parts(folder, some_documents(1, 10), 3)
    refused(tmp_path, [parts[0], parts[2]], "partition 1 of 3 is missing; run .*--rank 1 --world 3")
    write(folder / "corpus_part1_of_3_text_document", [])
    refused(tmp_path, [folder], "are both partition 1")
    (folder / "corpus_part1_of_3_text_document.bin").unlink()
    refused(tmp_path, [folder], r"corpus_part1_of_3_text_document\.bin is missing")
    (folder / "corpus_part1_of_3_text_document.idx").unlink()
    write_parts(folder, some_documents(1, 10), 2)
    refused(tmp_path, [folder], "some inputs are partitions of 2, others of 3")


def test_partition_beyond_the_last(tmp_path: Path) -> None:
    write_parts(tmp_path / "parts", some_documents(1, 4), 2)
    write(tmp_path / "parts" / "corpus_part002_of_002_text_document", [])
    refused(tmp_path, [tmp_path / "parts"], "the 2 partitions have the numbers 0 to 1")


def test_keys_beside_other_datasets(tmp_path: Path) -> None:
    write_parts(tmp_path / "parts", [], 1)
    write(tmp_path / "parts" / "other", [])
    refused(
        tmp_path, [tmp_path / "parts"], "other is not a partition, but other inputs are partitions .of text_document"
    )


def test_differences_are_refused_with_both_named(tmp_path: Path) -> None:
    documents = some_documents(1, 3)
    one = write(tmp_path / "one", documents)
    wide = write(tmp_path / "wide", documents, dtype="int32")
    refused(tmp_path, [one, wide], "wide: token dtype int32, but .*one has uint16")
    other = write(tmp_path / "other", documents, tokenizer_fingerprint="xyz")
    refused(tmp_path, [one, other], r"other: made with another tokenizer .* than .*one")
    unmarked = write(tmp_path / "unmarked", documents, extra={"append_eod": False})
    refused(tmp_path, [one, unmarked], r"unmarked: made without --append-eod and .*one with it")


def test_inputs_that_are_none(tmp_path: Path) -> None:
    one = write(tmp_path / "one", some_documents(1, 3))
    (tmp_path / "empty").mkdir()
    refused(tmp_path, [tmp_path / "empty"], r"contains no \.bin and \.idx")
    refused(tmp_path, [tmp_path / "x*"], "matches no dataset")
    refused(tmp_path, [tmp_path / "nothing"], r"nothing\.idx does not exist")
    refused(tmp_path, [one, one], "given twice")
    refused(tmp_path, [one, f"{one}.bin"], "given twice")
    refused(tmp_path, [one], "is also an input", output="one", overwrite=True)


def test_existing_output_and_another_writer(tmp_path: Path) -> None:
    one = write(tmp_path / "one", some_documents(1, 3))
    run_merge([one], tmp_path / "merged")
    refused(tmp_path, [one], "exists; .*--overwrite")
    two = write(tmp_path / "two", some_documents(2, 3))
    run_merge([tmp_path], tmp_path / "merged", overwrite=True)  # the folder of the output, which is not an input
    assert IndexedDataset(tmp_path / "merged").num_documents == 6
    with open(tmp_path / "merged.bin.partial", "wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        refused(tmp_path, [one, two], "another process is writing it", overwrite=True)


def test_the_second_output_failing_leaves_none(tmp_path: Path) -> None:
    write_parts(tmp_path / "parts", some_documents(1, 6), 2)
    write_parts(tmp_path / "parts", some_documents(2, 6), 2, "title_document")
    path = tmp_path / "parts" / "corpus_part001_of_002_title_document.bin"
    path.write_bytes(path.read_bytes()[::-1])
    refused(tmp_path, [tmp_path / "parts"], "part001_of_002_title_document.bin: damaged")


# ---- the tool -------------------------------------------------------------------------------------------------


def test_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_parts(tmp_path / "parts", some_documents(1, 10), 2)
    assert main(["--input", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "m")]) == 0
    assert "m: 2 datasets merged, 10 documents, " in capsys.readouterr().out
    assert main(["--input", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "m")]) == ConfigError.exit_code
    assert "exists" in capsys.readouterr().err
    assert main(["--input", str(tmp_path / "parts"), "--output-prefix", str(tmp_path)]) == ConfigError.exit_code
    assert "is a folder" in capsys.readouterr().err


def test_tool_says_when_there_is_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "one", some_documents(1, 3))
    two = write(tmp_path / "two", some_documents(2, 3), record=False)
    assert main(["--input", one, two, "--output-prefix", str(tmp_path / "m")]) == 0
    assert (
        "m: no record (.meta.json) was written, because " in (said := capsys.readouterr().err)
        and "two had none" in said
    )
    assert not record_path(tmp_path / "m").exists() and IndexedDataset(tmp_path / "m").num_documents == 6


def test_record_is_plain_json(tmp_path: Path) -> None:
    run_merge([write(tmp_path / "one", some_documents(1, 3))], tmp_path / "m")
    assert json.loads(record_path(tmp_path / "m").read_text())["checksums"]["bin"]["algorithm"] == "sha256"

"""Runs tools/preprocess_data.py as its users type it."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.cli import preprocess_data as cli
from megatron.data.indexed.dataset import IndexedDataset
from megatron.data.indexed.record import read_record
from megatron.errors import ConfigError
from tests.unit.preprocess.support import (
    ROOT,
    TOOL,
    Workshop,
    expected_documents,
    expected_files,
    make_workshop,
    sample_documents,
)


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return make_workshop(tmp_path)


def test_the_number_of_workers_can_be_searched_for(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    """Tries each number on the first documents and leaves no files. Which is fastest is not tested."""
    texts = [document["text"] for document in sample_documents(300)]
    corpus = workshop.corpus("in.jsonl", [{"meta": {"content": text}} for text in texts])
    tokenizer = ["--vocab", str(workshop.folder / "vocab.json"), "--merge-file", str(workshop.folder / "merges.txt")]
    given = ["--input", str(corpus), "--output-prefix", str(workshop.folder / "out"), "--json-keys", "meta.content"]
    before = sorted(workshop.folder.iterdir())
    for limit, documents in ((["--max-documents", "120"], 120), ([], 300)):
        assert cli.main([*tokenizer, *given, "--find-optimal-num-workers", "--workers-to-check", "2", "1", *limit]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"{documents} documents each time, fastest first:"
        rows = [re.fullmatch(r"--workers (\d) +([\d.]+) docs/s +[\d.]+ MB/s", line) for line in lines[1:-1]]
        assert sorted(row[1] for row in rows if row) == ["1", "2"] and len(rows) == 2
        rates = [float(row[2]) for row in rows if row]
        assert rates == sorted(rates, reverse=True) and rows[0] is not None
        assert lines[-1].startswith(f"--workers {rows[0][1]} is the fastest; no dataset was written")
        assert sorted(workshop.folder.iterdir()) == before
    assert (cli.powers_of_two(1), cli.powers_of_two(6), cli.powers_of_two(8)) == ([1], [1, 2, 4, 6], [1, 2, 4, 8])


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--max-documents", "5"], "--max-documents 5: only used with --find-optimal-num-workers"),
        (["--workers-to-check", "2", "4"], "--workers-to-check 2 4: only used with --find-optimal-num-workers"),
        (["--find-optimal-num-workers", "--input", "-"], "--find-optimal-num-workers: .* can be read only once"),
        (["--find-optimal-num-workers", "--json-keys", "nothing"], "in.jsonl has no document to measure with"),
    ],
)
def test_a_search_that_cannot_be_is_refused(
    flags: list[str], complaint: str, workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = workshop.corpus("in.jsonl", [{"text": "a"}])
    tokenizer = ["--vocab", str(workshop.folder / "vocab.json"), "--merge-file", str(workshop.folder / "merges.txt")]
    source = [] if "--input" in flags else ["--input", str(corpus)]
    given = [*source, "--output-prefix", str(workshop.folder / "out")]
    assert cli.main([*tokenizer, *given, *flags]) == ConfigError.exit_code
    assert re.search(complaint, capsys.readouterr().err)


def test_tokenizer_flags_of_main(workshop: Workshop) -> None:
    workshop.corpus("ids.jsonl", [{"text": "5 7"}, {"text": "9"}])
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "10", "--null-tokenizer-eod-id", "0", "--append-eod"]
    given = ["--input", "ids.jsonl", "--output-prefix", "out", "--workers", "1", "--tiktoken-pattern", "v1"]
    done = workshop.run(*null, *given, tokenizer=False)
    assert done.returncode == 0, done.stderr
    assert "--tiktoken-pattern v1: has no effect without --tokenizer-type TikTokenizer" in done.stderr
    data = IndexedDataset(str(workshop.folder / "out_text_document"))
    assert [data.get(n).tolist() for n in range(2)] == [[5, 7, 0], [9, 0]]


def test_the_tutorials_command(workshop: Workshop) -> None:
    texts = [document["text"] for document in sample_documents(300)]
    workshop.corpus("codeparrot_data.json", ({"content": text} for text in texts))
    (workshop.folder / "tools").symlink_to(ROOT / "tools")
    command = """
python tools/preprocess_data.py \
       --input codeparrot_data.json \
       --output-prefix codeparrot \
       --vocab vocab.json \
       --dataset-impl mmap \
       --tokenizer-type GPT2BPETokenizer \
       --merge-file merges.txt \
       --json-keys content \
       --workers 32 \
       --chunk-size 25 \
       --append-eod
"""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    told = {**os.environ, "PATH": path, "PYTHONPROFILEIMPORTTIME": "1"}  # every interpreter says what it imports
    done = subprocess.run(["bash", "-c", command], cwd=workshop.folder, env=told, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    starts = len(re.findall(r"\| +site\n", done.stderr))
    assert 1 <= starts < 8, "32 workers must not cost 32 starts of an interpreter"
    wanted = expected_files(expected_documents(workshop.tokenizer, texts, eod=True))
    assert workshop.output("codeparrot", "content") == wanted
    assert "codeparrot_content_document: 300 documents" in done.stdout
    empty = sum(not text for text in texts)
    assert f"{empty} empty" in done.stdout and "bytes per token" in done.stdout


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("chunk_size", [1, 7])
def test_output_does_not_depend_on_workers(workshop: Workshop, workers: int, chunk_size: int) -> None:
    documents = sample_documents(100)
    workshop.corpus("in.jsonl", documents)
    flags = ("--workers", str(workers), "--chunk-size", str(chunk_size))
    done = workshop.run("--input", "in.jsonl", "--output-prefix", "o", *flags)
    assert done.returncode == 0, done.stderr
    texts = [document["text"] for document in documents]
    assert workshop.output("o") == expected_files(expected_documents(workshop.tokenizer, texts, eod=False))


def test_the_dataset_opens_and_its_record_says_what_made_it(workshop: Workshop) -> None:
    documents = sample_documents(40)
    workshop.corpus("in.jsonl", documents)
    assert workshop.run("--input", "in.jsonl", "--output-prefix", "o", "--append-eod").returncode == 0
    tokenizer = workshop.tokenizer
    data = IndexedDataset(workshop.folder / "o_text_document")
    full = [document["text"] for document in documents if document["text"]]
    assert len(data) == len(full) and data.num_documents == 40
    assert tokenizer.detokenize(data[0][:-1].tolist()) == full[0] and data[0][-1] == tokenizer.eod
    record = read_record(workshop.folder / "o_text_document")
    assert record is not None
    assert record.tokenizer_fingerprint == tokenizer.fingerprint
    assert (record.vocab_size, record.eod_id) == (tokenizer.vocab_size, tokenizer.eod)
    assert record.max_id == max(int(data[i].max()) for i in range(len(data)))
    assert (record.documents, record.tokens) == (40, data.num_tokens)
    assert record.source == ("in.jsonl",)
    assert record.extra["tokenizer_type"] == "GPT2BPETokenizer"
    assert (record.extra["json_key"], record.extra["append_eod"]) == ("text", True)


def test_several_keys_files_patterns_and_gz(workshop: Workshop) -> None:
    tokenizer = workshop.tokenizer
    bodies = [f"body {i} " * i for i in range(6)]
    rows = [{"title": f"title {i}", "body": body, "n": i} for i, body in enumerate(bodies)]
    workshop.corpus("part-1.jsonl", rows[2:4])
    workshop.corpus("part-0.jsonl", rows[:2])
    with gzip.open(workshop.folder / "last.json.gz", "wb") as stream:
        stream.write("\n".join(json.dumps(row) for row in rows[4:]).encode())  # no newline at the end
    flags = ("--json-keys", "title", "body", "--append-eod")
    done = workshop.run("--input", "part-*.jsonl", "last.json.gz", "--output-prefix", "o", *flags)
    assert done.returncode == 0, done.stderr
    titles = [f"title {i}" for i in range(6)]
    assert workshop.output("o", "title") == expected_files(expected_documents(tokenizer, titles, eod=True))
    assert workshop.output("o", "body") == expected_files(expected_documents(tokenizer, bodies, eod=True))
    record = read_record(workshop.folder / "o_body_document")
    assert record is not None and record.source == ("part-0.jsonl", "part-1.jsonl", "last.json.gz")


def test_a_list_of_texts_is_one_document_of_several_sequences(workshop: Workshop) -> None:
    tokenizer = workshop.tokenizer
    workshop.corpus("in.jsonl", [{"text": ["one", "", "two"]}, {"text": "three"}, {"text": []}])
    assert workshop.run("--input", "in.jsonl", "--output-prefix", "o", "--append-eod").returncode == 0
    one, two, three = (tokenizer.tokenize(text) for text in ("one", "two", "three"))
    wanted = [[one, [*two, tokenizer.eod]], [[*three, tokenizer.eod]], []]
    assert workshop.output("o") == expected_files(wanted)


def test_special_token_text_does_not_become_the_end_of_a_document(workshop: Workshop) -> None:
    tokenizer = workshop.tokenizer
    workshop.corpus("in.jsonl", [{"text": "a<|endoftext|>b"}] * 3)
    for flags, count in (((), 0), (("--append-eod", "--overwrite"), 3)):
        assert workshop.run("--input", "in.jsonl", "--output-prefix", "o", *flags).returncode == 0
        data = IndexedDataset(workshop.folder / "o_text_document")
        assert sum(int((data[i] == tokenizer.eod).sum()) for i in range(len(data))) == count
    assert tokenizer.detokenize(data[0][:-1].tolist()) == "a<|endoftext|>b"


def test_line_endings_bom_nul_and_blank_lines(workshop: Workshop) -> None:
    lines = [
        b'\xef\xbb\xbf{"text": "first"}\r',
        b"",
        b"  \t\r",
        b'{"text": "a\\u0000b"}',
        b'{"text": "x", "text": "y"}',
    ]
    workshop.corpus("in.jsonl", lines)
    done = workshop.run("--input", "in.jsonl", "--output-prefix", "o")
    assert done.returncode == 0, done.stderr
    assert "blank lines skipped: 2" in done.stdout
    wanted = expected_documents(workshop.tokenizer, ["first", "a\0b", "y"], eod=False)  # of two keys the last counts
    assert workshop.output("o") == expected_files(wanted)


def test_numbers_of_any_length_elsewhere_in_a_line_do_not_matter(workshop: Workshop) -> None:
    workshop.corpus("in.jsonl", ['{"text": "a", "n": ' + "7" * 100_000 + "}"])
    assert workshop.run("--input", "in.jsonl", "--output-prefix", "o").returncode == 0


def test_hugging_face_and_null_tokenizers(workshop: Workshop) -> None:
    workshop.tokenizer.save_pretrained(workshop.folder / "hf")
    documents = sample_documents(30)
    texts = [document["text"] for document in documents]
    workshop.corpus("in.jsonl", documents)
    flags = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "hf", "--append-eod")
    done = workshop.run("--input", "in.jsonl", "--output-prefix", "hf", *flags, tokenizer=False)
    assert done.returncode == 0, done.stderr
    assert workshop.output("hf") == expected_files(expected_documents(workshop.tokenizer, texts, eod=True))
    workshop.corpus("ids.jsonl", [{"text": "5 99999"}, {"text": "7"}])
    flags = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "100000", "--append-eod")
    done = workshop.run("--input", "ids.jsonl", "--output-prefix", "null", *flags, tokenizer=False)
    assert done.returncode == 0, done.stderr
    assert workshop.output("null") == expected_files([[[5, 99999, 100000]], [[7, 100000]]], code=4)


def test_progress_comes_every_log_interval(workshop: Workshop) -> None:
    workshop.corpus("in.jsonl", sample_documents(50))
    done = workshop.run("--input", "in.jsonl", "--output-prefix", "o", "--chunk-size", "5", "--log-interval", "20")
    lines = [line for line in done.stderr.splitlines() if line.startswith("Processed")]
    assert [line.split()[1] for line in lines] == ["20", "40"]
    assert all(word in lines[0] for word in ("docs/s", "MB/s", "tokens", "ETA"))


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(TOOL), "--help"], capture_output=True, text=True, check=True
    )
    assert not [name for name in ("torch", "numpy", "tokenizers") if f"| {name}\n" in done.stderr]
    for flag in ("--vocab-file", "--json-keys", "--overwrite", "--help-all"):
        assert flag in done.stdout


def test_the_job_loads_no_torch(workshop: Workshop) -> None:
    workshop.corpus("in.jsonl", sample_documents(3))
    command = [sys.executable, "-X", "importtime", *workshop.command("--input", "in.jsonl", "--output-prefix", "o")[1:]]
    done = subprocess.run(command, cwd=workshop.folder, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert "tokenizers" in loaded and "torch" not in loaded and "transformers" not in loaded


# ---------------------------------------------------------------- rejections before any work


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--output-prefix o", "required: --input"),
        ("--input in.jsonl", "required: --output-prefix"),
        ("--input none.jsonl --output-prefix o", "--input none.jsonl: there is no such file"),
        ("--input none*.jsonl --output-prefix o", "--input none*.jsonl: no file matches"),
        ("--input in.bz2 --output-prefix o", ".bz2 is not supported; unpack it first"),
        ("--input - in.jsonl --output-prefix o", "standard input (-) excludes other inputs; give only -"),
        ("--input in.jsonl --output-prefix here/", "--output-prefix here/: is a folder; add the name"),
        ("--input in.jsonl ./in.jsonl --output-prefix o", "given twice, so its documents would count twice"),
        ("--input in.jsonl --output-prefix no/o", "no: no such directory"),
        ("--input in.jsonl --output-prefix o --wokers 3", "--wokers: no such flag; did you mean --workers?"),
        ("--inptu in.jsonl --output-prefix o", "--inptu: no such flag; did you mean --input?"),
        ("--input in.jsonl --output-prefix o --work 3", "--work: no such flag; see --help"),
        ("--input in.jsonl --output-prefix o --append-eod yes", "yes: not a flag"),
        ("--input in.jsonl --output-prefix o --workers 0", "--workers: 0 is less than 1"),
        ("--input in.jsonl --output-prefix o --workers two", "--workers: 'two' is not a whole number"),
        ("--input in.jsonl --output-prefix o --workers 2 --workers 3", "--workers: given twice"),
        ("--input in.jsonl --output-prefix o --dataset-impl map", "--dataset-impl: invalid choice"),
        ("--input in.jsonl --output-prefix o --rank 0", "--rank 0: --world is missing"),
        ("--input in.jsonl --output-prefix o --world 2", "--world 2: --rank is missing"),
        ("--input in.jsonl --output-prefix o --rank 2 --world 2", "--rank 2: there are 2 partitions; give 0 to 1"),
        ("--input in.jsonl --output-prefix o --rank 0 --world 2 --partitions 3", "--partitions 3: --world is 2"),
        ("--input in.jsonl --output-prefix o --resume --overwrite", "give one of the two"),
        ("--input in.jsonl --output-prefix o --keep-newlines", "--keep-newlines: only used with --split-sentences"),
        ("--input in.jsonl --output-prefix o --lang english", "--lang: only used with --split-sentences"),
        ("--input in.jsonl --output-prefix o --json-keys a a", "a is given twice"),
        ("--input in.jsonl --output-prefix o --json-keys a/b", "--json-keys a/b: a key with a slash"),
        ("--input in.jsonl --output-prefix o --max-skip-fraction 0.1", "only used with --on-error skip"),
        ("--input in.jsonl --output-prefix o --on-error skip --max-skip-fraction 2", "2 is not a number from 0 to 1"),
        ("--input in.jsonl --output-prefix o --tokenizer-type TikTokenizer", "TikTokenizer does not use it"),
        ("--input in.jsonl --output-prefix o --vocab-size 3", "--vocab-size 3: the GPT2BPETokenizer has"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    workshop: Workshop,
    flags: str,
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    workshop.corpus("in.jsonl", sample_documents(3))
    (workshop.folder / "in.bz2").touch()
    monkeypatch.chdir(workshop.folder)
    assert cli.main(workshop.command(*flags.split())[2:]) == 2
    errors = capsys.readouterr().err
    assert complaint in errors and errors.count("\n") == 1, errors
    assert workshop.leftovers("_text_document") == []


def test_eod_missing_from_the_vocabulary_is_refused_only_when_asked_for(workshop: Workshop) -> None:
    vocab = workshop.folder / "vocab.json"
    vocab.write_text(vocab.read_text(encoding="utf-8").replace("<|endoftext|>", "<|other|>"), encoding="utf-8")
    workshop.corpus("in.jsonl", sample_documents(3))
    done = workshop.run("--input", "in.jsonl", "--output-prefix", "o", "--append-eod")
    assert done.returncode == 2 and "vocab.json has no <|endoftext|>" in done.stderr
    assert workshop.run("--input", "in.jsonl", "--output-prefix", "o").returncode == 0


@pytest.mark.parametrize("there", [".bin", ".idx"])
def test_an_existing_output_is_kept_without_overwrite(workshop: Workshop, there: str) -> None:
    workshop.corpus("in.jsonl", [{"a": "x", "text": "y"}])
    old = workshop.folder / f"o_text_document{there}"
    old.write_bytes(b"precious")
    flags = ("--input", "in.jsonl", "--output-prefix", "o", "--json-keys", "a", "text")
    done = workshop.run(*flags)
    assert done.returncode == 2 and f"o_text_document{there} exists; give --overwrite" in done.stderr
    assert workshop.leftovers("o_") == [old.name] and old.read_bytes() == b"precious"
    assert workshop.run(*flags, "--overwrite").returncode == 0
    assert len(IndexedDataset(workshop.folder / "o_text_document")) == 1


def test_keep_sequential_samples_is_a_named_no_op(workshop: Workshop) -> None:
    workshop.corpus("in.jsonl", sample_documents(3))
    done = workshop.run("--input", "in.jsonl", "--output-prefix", "o", "--keep-sequential-samples")
    assert done.returncode == 0 and "--keep-sequential-samples: no-op" in done.stderr


# ---------------------------------------------------------------- other ways to give the input, and to share it


def test_standard_input_and_underscores(workshop: Workshop) -> None:
    path = workshop.corpus("in.jsonl", sample_documents(80))
    assert workshop.run("--input", "in.jsonl", "--output-prefix", "file", "--append-eod").returncode == 0
    command = workshop.command("--input", "-", "--output_prefix=pipe_d", "--append_eod", "--json_keys", "text")
    with open(path, "rb") as stream:
        done = subprocess.run(command, cwd=workshop.folder, stdin=stream, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert workshop.output("pipe_d") == workshop.output("file")


def test_partitions_alone_change_nothing_and_say_so(workshop: Workshop) -> None:
    workshop.corpus("in.jsonl", sample_documents(20))
    assert workshop.run("--input", "in.jsonl", "--output-prefix", "one").returncode == 0
    done = workshop.run("--input", "in.jsonl", "--output-prefix", "many", "--partitions", "4", "--workers", "4")
    assert done.returncode == 0 and "--partitions 4: no-op" in done.stderr
    assert workshop.output("many") == workshop.output("one")


def test_partitions_merged_are_the_single_run(workshop: Workshop) -> None:
    text = " ".join(f"word{i}" for i in range(3000))
    workshop.corpus("in.jsonl", [{"text": f"{i} {text}"} for i in range(60)])
    flags = ("--input", "in.jsonl", "--append-eod")
    assert workshop.run(*flags, "--output-prefix", "whole").returncode == 0
    for rank in ("0", "1", "2"):
        assert workshop.run(*flags, "--output-prefix", "o", "--rank", rank, "--partitions", "3").returncode == 0
    tool = str(ROOT / "tools" / "merge_datasets.py")
    command = [sys.executable, tool, "--input", "o_part*", "--output-prefix", "merged_text_document"]
    done = subprocess.run(command, cwd=workshop.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert workshop.output("merged") == workshop.output("whole")
    records = [read_record(workshop.folder / f"{name}_text_document") for name in ("merged", "whole")]
    assert records[0] is not None and records[1] is not None
    assert records[0].bin == records[1].bin and records[0].index_fingerprint == records[1].index_fingerprint


def test_what_encodes_is_said(workshop: Workshop) -> None:
    workshop.corpus("in.jsonl", sample_documents(5))
    done = workshop.run("--input", "in.jsonl", "--output-prefix", "o", "--encoder", "exact")
    assert done.returncode == 0 and "encoder: exact" in done.stdout

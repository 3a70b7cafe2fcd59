"""The command line of tools/inspect_dataset.py: shows the content of datasets and verifies them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.errors import ConfigError, DataError, MegatronError
from megatron.utils.command_line import Parser, fields_from, integer, run_tool
from megatron.utils.log import print_line
from megatron.utils.numerals import INT32
from megatron.utils.progress import ByteProgress

if TYPE_CHECKING:
    from megatron.data.indexed.dataset import IndexedDataset
    from megatron.data.indexed.record import DataRecord
    from megatron.data.indexed.statistics import Statistics
    from megatron.data.indexed.verify import Verified
    from megatron.tokenizer import Tokenizer

NAME = "inspect_dataset.py"
_SHOWN = 256  # most tokens shown of a document, without --tokens
_TERMINAL = "terminal"


def build_parser() -> Parser:
    parser = Parser(prog=NAME, description="Shows what a .bin/.idx dataset holds; --verify checks that it is intact.")
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="a dataset, without .bin or .idx; or its URL")
    parser.add_argument("--verify", action="store_true", help="read every byte: checksums, ids, ends of documents")
    parser.add_argument(
        "--document", type=integer(0), nargs="+", metavar="N", help="show these documents (text, with a tokenizer)"
    )
    parser.add_argument(
        "--tokens", type=integer(1), metavar="N", help=f"most tokens to show of each document ({_SHOWN})"
    )
    parser.add_argument(
        "--histogram", nargs="?", const=_TERMINAL, metavar="FILE",
        help="histogram of the documents' lengths: in the terminal, or a FILE.svg or FILE.png",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one line of JSON per dataset")
    parser.add_argument("--work-folder", metavar="DIR", help="folder for local copies of URLs (here)")
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", metavar="NAME", help="as in preprocess_data.py")
    group.add_argument("--vocab-file", "--vocab", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    group.add_argument("--merge-file", "--merges-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    group.add_argument("--tokenizer-model", metavar="PATH", help="tokenizer.json, or its folder")
    group.add_argument(
        "--vocab-size", type=integer(1, INT32), metavar="N", help="upper limit of ids for --verify without a tokenizer"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return run_tool(NAME, lambda: inspect_all(parse(argv)))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    arguments = build_parser().parse_known_flags(argv)
    picture = arguments.histogram
    if picture not in (None, _TERMINAL) and not picture.endswith((".svg", ".png")):
        raise ConfigError(f"--histogram {picture}: the file must be a .svg or a .png; put prefixes before --histogram")
    if picture not in (None, _TERMINAL) and len(arguments.prefixes) > 1:
        raise ConfigError(f"--histogram {picture}: draws only one dataset; give one PREFIX")
    if arguments.tokens is not None and arguments.document is None:
        arguments.document = [0]
    return arguments


def inspect_all(arguments: argparse.Namespace) -> int:
    """Inspects all datasets. Returns 0, or the exit code of the first damaged one."""
    tokenizer = _tokenizer(arguments)
    code = 0
    for prefix in arguments.prefixes:
        try:
            facts = _inspect_anywhere(prefix.removesuffix(".idx").removesuffix(".bin"), arguments, tokenizer)
        except MegatronError as error:
            print_line(f"{NAME}: {error}", sys.stderr)
            code = code or error.exit_code
            if arguments.json:
                print(json.dumps({"prefix": prefix, "error": str(error)}))
            continue
        if arguments.json:
            print(json.dumps(facts, ensure_ascii=False))
    return code


def _inspect_anywhere(prefix: str, arguments: argparse.Namespace, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Inspects a dataset, downloading it first if it is a URL."""
    from megatron.data.remote import is_url, refuse_secrets

    if not is_url(prefix):
        return inspect(prefix, arguments, tokenizer)
    from megatron.cli.merge_datasets import temporary_folder
    from megatron.data.remote_pairs import fetch_pair

    refuse_secrets(prefix)
    with temporary_folder(arguments.work_folder) as folder:
        if not arguments.json:
            print_line(f"{prefix}:")
        return {**inspect(fetch_pair(prefix, folder), arguments, tokenizer), "prefix": prefix}


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer | None:
    given = (arguments.tokenizer_type, arguments.vocab_file, arguments.merge_file, arguments.tokenizer_model)
    if not any(given):
        return None
    from megatron.tokenizer import TokenizerSettings, build_tokenizer

    return build_tokenizer(TokenizerSettings(**fields_from(arguments, TokenizerSettings)), announce=False)


def inspect(prefix: str, arguments: argparse.Namespace, tokenizer: Tokenizer | None) -> dict[str, Any]:
    from megatron.data.indexed.dataset import IndexedDataset
    from megatron.data.indexed.record import difference_of, read_record
    from megatron.data.indexed.statistics import length_statistics

    data, record = IndexedDataset(prefix), read_record(prefix)
    if record is not None and tokenizer is not None and record.tokenizer_fingerprint not in tokenizer.fingerprints:
        raise DataError(
            f"{prefix}: made with another tokenizer (vocabulary {record.vocab_size}) than the one given (vocabulary "
            f"{tokenizer.vocab_size}){difference_of(record, tokenizer)}; give the tokenizer that the data was made with"
        )
    numbers = length_statistics(data)
    facts = _facts(data, record, numbers)
    if not arguments.json:
        print("\n".join(_lines(data, record, numbers)))
    for number in arguments.document or ():
        facts.setdefault("shown", []).append(_show(data, number, arguments, tokenizer))
    if arguments.histogram is not None:
        _picture(prefix, numbers, arguments)
    if arguments.verify:
        verified = _verify(prefix, record, arguments, tokenizer)
        facts["verified"] = dataclasses.asdict(verified)
    return facts


def _facts(data: IndexedDataset, record: DataRecord | None, numbers: Statistics) -> dict[str, Any]:
    kept = None if record is None else dataclasses.asdict(record)
    return {
        "prefix": data.prefix,
        "index": "lazy or cached" if data.legacy else "mmap",
        "dtype": data.dtype.name,
        "bytes": data.num_tokens * data.dtype.itemsize,
        **dataclasses.asdict(numbers),
        "record": kept,
    }


def _lines(data: IndexedDataset, record: DataRecord | None, numbers: Statistics) -> list[str]:
    cuts = ", ".join(f"{name}% {cut:,}" for name, cut in numbers.percentiles.items())
    kind = "lazy or cached (TNTIDX)" if data.legacy else "mmap"
    size = data.num_tokens * data.dtype.itemsize
    longest = f" (document {numbers.longest_document})" if numbers.documents else ""
    lines = [
        f"{data.prefix}",
        f"  documents   {numbers.documents:,} ({numbers.empty:,} empty)",
        f"  sequences   {numbers.sequences:,} ({numbers.empty_sequences:,} empty)",
        f"  tokens      {numbers.tokens:,} ({data.dtype.name}, {size:,} bytes, index: {kind})",
        f"  lengths     shortest {numbers.shortest:,}, mean {numbers.mean:,.1f}, longest {numbers.longest:,}{longest}",
        f"  percentiles {cuts}",
    ]
    if record is None:
        return [*lines, "  record      none (.meta.json): the data, or a part of it, was made by another program"]
    marked = {True: "at each document's end", False: "not appended", None: "unknown whether appended"}
    sums = ", ".join(f".{name}: {len(known.blocks)} blocks" for name, known in record.files.items())
    return [
        *lines,
        f"  tokenizer   {record.extra.get('tokenizer_type', 'fingerprint')} {record.tokenizer_fingerprint[:16]}, "
        f"vocabulary {record.vocab_size:,}, largest id {record.max_id:,}",
        f"  end of doc. {record.eod_id} ({marked[record.append_eod]})",
        f"  sources     {', '.join(record.source[:5]) or 'unknown'}"
        + (f" and {len(record.source) - 5} more" if len(record.source) > 5 else ""),
        f"  checksums   {sums or 'none: written by an earlier release'}",
    ]


def _show(
    data: IndexedDataset, number: int, arguments: argparse.Namespace, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    if number >= data.num_documents:
        raise ConfigError(
            f"--document {number}: {data.prefix} has {data.num_documents} documents, numbered from 0; give a smaller "
            "number"
        )
    first, stop = (int(data.document_indices[n]) for n in (number, number + 1))
    limit, ids = arguments.tokens or _SHOWN, list[int]()
    length = int(data.sequence_lengths[first:stop].sum(dtype="int64"))
    for sequence in range(first, stop):
        available = int(data.sequence_lengths[sequence])
        ids += data.get(sequence, 0, min(available, limit - len(ids))).tolist()
        if len(ids) >= limit:
            break
    shown: dict[str, Any] = {"document": number, "sequences": stop - first, "length": length, "ids": ids}
    if tokenizer is not None:
        wrong = next((i for i in ids if not 0 <= i < tokenizer.vocab_size), None)
        if wrong is not None:
            raise DataError(
                f"{data.prefix}: document {number}: token id {wrong} is not below the vocabulary size "
                f"{tokenizer.vocab_size}; give the tokenizer that the data was made with"
            )
        shown["text"] = tokenizer.detokenize(ids)
    if not arguments.json:
        more = f", the first {len(ids):,} (--tokens)" if length > len(ids) else ""
        print(f"document {number}: {length:,} tokens in {stop - first} sequences{more}")
        print(shown["text"] if tokenizer is not None else " ".join(map(str, ids)))
    return shown


def _picture(prefix: str, numbers: Statistics, arguments: argparse.Namespace) -> None:
    from megatron.data.indexed import statistics

    title = f"{Path(prefix).name}: {numbers.documents:,} documents, {numbers.tokens:,} tokens"
    if arguments.histogram == _TERMINAL:
        if not arguments.json:
            plain = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
            print(statistics.draw_histogram(numbers.bins, block="#" if plain else "█"))
        return
    if arguments.histogram.endswith(".svg"):
        content = statistics.draw_svg(numbers.bins, title).encode()
    else:
        try:
            content = statistics.draw_png(numbers.bins, title)
        except ImportError:
            raise ConfigError(
                f"--histogram {arguments.histogram}: a .png needs matplotlib, which is not installed "
                f"({sys.executable} -m pip install matplotlib); or give a .svg, which needs no package"
            ) from None
    from megatron.utils.durable import write_atomically, writing

    path = Path(arguments.histogram)
    with writing(path):
        write_atomically(path, [content])
    if not arguments.json:
        print(f"histogram written to {arguments.histogram}")


def _verify(
    prefix: str, record: DataRecord | None, arguments: argparse.Namespace, tokenizer: Tokenizer | None
) -> Verified:
    from megatron.data.indexed.verify import verify_dataset

    started = time.monotonic()
    verified = verify_dataset(
        prefix,
        record,
        vocab_size=tokenizer.vocab_size if tokenizer is not None else arguments.vocab_size,
        eod_id=tokenizer.eod_id if tokenizer is not None else None,
        on_bytes=ByteProgress("verified").show,
    )
    if not arguments.json:
        seconds = max(time.monotonic() - started, 1e-9)
        speed = f"{verified.bytes / 1e9:.2f} GB in {seconds:.1f} s"
        print_line(f"{prefix}: good: {', '.join(verified.checked)} ({speed})")
        for line in verified.not_checked:
            print_line(f"{prefix}: not checked: {line}")
        if verified.eod_inside:
            print(f"{prefix}: {verified.eod_inside:,} end-of-document tokens are not at the end of a document")
    return verified

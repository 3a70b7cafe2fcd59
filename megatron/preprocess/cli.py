"""tools/preprocess_data.py: its flags, as Megatron's tutorials type them, and its summary."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.config.tool import Parser, fraction, integer, run_tool
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.preprocess.run import PreprocessSettings, Report

NAME = "preprocess_data.py"


def main(argv: Sequence[str] | None = None) -> int:
    def job() -> None:
        settings = parse(sys.argv[1:] if argv is None else argv)
        from megatron.preprocess.run import Terminated, preprocess  # numpy and tokenizers, after --help

        try:
            report = preprocess(settings, say=lambda line: print(line, file=sys.stderr))
        except Terminated as end:
            print(f"{NAME}: ended by signal {end.number}; nothing was written", file=sys.stderr)
            raise SystemExit(128 + end.number) from None
        print_summary(report)

    return run_tool(NAME, job)


def build_parser() -> Parser:
    parser = Parser(prog=NAME, description="JSON lines to the .bin/.idx datasets that training reads.")
    _add_data_flags(parser.add_argument_group("input and output"))
    _add_tokenizer_flags(parser.add_argument_group("tokenizer"))
    _add_run_flags(parser.add_argument_group("running"))
    _add_flags_for_later(parser.add_argument_group("not supported yet"))
    return parser


def _add_data_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--input", nargs="+", required=True, metavar="FILE", help="JSON lines; patterns and .gz too")
    group.add_argument(
        "--output-prefix", required=True, metavar="PATH", help="writes PATH_KEY_document.bin, .idx and .meta.json"
    )
    group.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys of the text, a dataset each (text)"
    )
    group.add_argument("--append-eod", action="store_true", help="put an end-of-document token after each document")
    group.add_argument("--overwrite", action="store_true", help="replace an existing output")
    group.add_argument(
        "--dataset-impl", choices=("lazy", "cached", "mmap"), default="mmap", help="kind of index; mmap is written"
    )
    group.add_argument(
        "--on-error", choices=("stop", "skip"), default="stop", help="at a line that gives no document (stop)"
    )
    group.add_argument(
        "--max-skip-fraction",
        type=fraction,
        default=1.0,
        metavar="X",
        help="with --on-error skip: fail when more than this share of the lines is bad (1: never)",
    )


def _add_tokenizer_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tokenizer-type", metavar="NAME", help="GPT2BPETokenizer, HuggingFaceTokenizer or NullTokenizer"
    )
    group.add_argument("--vocab-file", "--vocab", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    group.add_argument("--merge-file", "--merges-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    group.add_argument("--tokenizer-model", metavar="PATH", help="tokenizer.json, or the folder it lies in")
    group.add_argument("--vocab-size", type=integer(1), metavar="N", help="ids of NullTokenizer")


def _add_run_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workers", type=integer(1), default=_usable_cores(), metavar="N", help="processes (one for each core)"
    )
    group.add_argument(
        "--chunk-size",
        type=integer(1),
        default=512,
        metavar="N",
        help="most documents given to a worker at a time (512)",
    )
    group.add_argument(
        "--log-interval", type=integer(1), default=1000, metavar="N", help="documents between progress lines (1000)"
    )


def _add_flags_for_later(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--partitions", type=integer(1), default=1, metavar="N", help="1")
    group.add_argument("--keep-sequential-samples", action="store_true", help="means nothing here: order is kept")
    group.add_argument("--split-sentences", action="store_true", help="refused")
    group.add_argument("--keep-newlines", action="store_true", help="refused")
    group.add_argument("--lang", metavar="NAME", help="refused")


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse(argv: Sequence[str]) -> PreprocessSettings:
    arguments = build_parser().parse_known_flags(argv)
    _refuse_later(arguments)
    _check(arguments)
    from megatron.preprocess.run import PreprocessSettings
    from megatron.tokenizer.build import TokenizerSettings

    return PreprocessSettings(
        inputs=tuple(arguments.input),
        output_prefix=arguments.output_prefix,
        tokenizer=TokenizerSettings(
            tokenizer_type=arguments.tokenizer_type,
            tokenizer_model=arguments.tokenizer_model,
            vocab_file=arguments.vocab_file,
            merge_file=arguments.merge_file,
            vocab_size=arguments.vocab_size,
        ),
        json_keys=tuple(arguments.json_keys),
        append_eod=arguments.append_eod,
        workers=arguments.workers,
        chunk_size=arguments.chunk_size,
        log_interval=arguments.log_interval,
        overwrite=arguments.overwrite,
        on_error=arguments.on_error,
        max_skip_fraction=arguments.max_skip_fraction,
    )


def _refuse_later(arguments: argparse.Namespace) -> None:
    if arguments.dataset_impl != "mmap":
        raise ConfigError(f"--dataset-impl {arguments.dataset_impl}: not supported yet; use mmap")
    if arguments.partitions != 1:
        raise ConfigError(
            f"--partitions {arguments.partitions}: not supported yet; use 1, all --workers share the files"
        )
    if arguments.split_sentences:
        raise ConfigError("--split-sentences: not supported yet; leave it out, GPT is trained on whole documents")
    if arguments.keep_newlines:
        raise ConfigError("--keep-newlines: only means something with --split-sentences, which is not supported yet")
    if arguments.lang is not None:
        raise ConfigError(
            f"--lang {arguments.lang}: only means something with --split-sentences, which is not supported yet"
        )
    if arguments.keep_sequential_samples:
        print("--keep-sequential-samples: nothing to do, documents always keep their order", file=sys.stderr)


def _check(arguments: argparse.Namespace) -> None:
    keys = arguments.json_keys
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"--json-keys {' '.join(keys)}: {key} stands there twice; name each key once")
        if "/" in key or "\0" in key:
            raise ConfigError(f"--json-keys {key}: a key with a slash cannot be part of the output's name; rename it")
    if arguments.on_error == "stop" and arguments.max_skip_fraction != 1.0:
        raise ConfigError(f"--max-skip-fraction {arguments.max_skip_fraction:g}: only used with --on-error skip")


def print_summary(report: Report) -> None:
    for key in report.keys:
        written = key.summary
        per_token = key.text_bytes / written.tokens
        print(
            f"{written.prefix}: {written.documents} documents, {written.tokens} tokens ({written.dtype}), "
            f"{per_token:.2f} bytes per token, longest document {written.longest_document} tokens, "
            f"{written.empty_documents} empty"
        )
    if report.blank_lines:
        print(f"blank lines skipped: {report.blank_lines}")
    for kind, count in sorted(report.bad_lines.items()):
        print(f"bad lines skipped: {count} ({kind})")
    print(
        f"{report.documents} documents in {report.seconds:.1f} s: {report.documents / report.seconds:.1f} docs/s, "
        f"{report.megabytes_per_second:.2f} MB/s"
    )

"""The command line of tools/preprocess_data.py: flags spelled as in Megatron's tutorials, and the summary."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.errors import ConfigError
from megatron.utils.command_line import Parser, fields_from, fraction, integer, run_tool
from megatron.utils.log import print_line
from megatron.utils.numerals import INT32, LARGEST_WORLD, MOST_PROCESSES
from megatron.utils.process import usable_cpus

if TYPE_CHECKING:
    from megatron.preprocess.merge import Report
    from megatron.preprocess.options import PreprocessSettings

NAME = "preprocess_data.py"
_FIRST_SCREEN = """\
Turns text in JSON lines into the .bin/.idx datasets that training reads.

  python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus \\
    --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json \\
    --merge-file merges.txt --append-eod --workers 4

writes corpus_text_document.bin, .idx and .meta.json; training reads them with
--data-path corpus_text_document.

Flags that every run needs:
  --input FILE ...          .jsonl, .json, .gz, .zst, .parquet; - is stdin
  --output-prefix PATH      beginning of the output files' names
  --json-keys KEY ...       keys that hold the text (default: text)
  --tokenizer-type NAME     GPT2BPETokenizer, HuggingFaceTokenizer, ...
  --vocab-file, --merge-file, --tokenizer-model
                            the tokenizer's files
  --append-eod              an end-of-document token after each document
  --workers N               processes (default: one for each core)
  --resume, --overwrite     after an interrupted run

"""


def main(argv: Sequence[str] | None = None) -> int:
    def job() -> None:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
        settings, folder = settings_and_folder(arguments)
        if arguments.find_optimal_num_workers:
            return find_workers(arguments, settings, folder)
        from megatron.data.remote import is_url
        from megatron.preprocess.run import Terminated, preprocess  # they load numpy and tokenizers, after --help

        def say(line: str) -> None:
            print(line, file=sys.stderr)

        try:
            if is_url(settings.output_prefix):
                from megatron.preprocess.to_url import preprocess_to_url

                report = preprocess_to_url(settings, folder, say)
            else:
                report = preprocess(settings, say)
        except Terminated as end:
            print(f"{NAME}: ended by signal {end.number}; {end.kept}", file=sys.stderr)
            raise SystemExit(128 + end.number) from None
        print_summary(report)

    return run_tool(NAME, job)


def build_parser() -> Parser:
    parser = Parser(prog=NAME, first_screen=_FIRST_SCREEN)
    _add_data_flags(parser.add_argument_group("files"))
    _add_text_flags(parser.add_argument_group("text"))
    _add_tokenizer_flags(parser.add_argument_group("tokenizer"))
    _add_run_flags(parser.add_argument_group("running"))
    _add_trial_flags(parser.add_argument_group("trials"))
    _add_partition_flags(parser.add_argument_group("partition"))
    return parser


def _add_data_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--input", nargs="+", required=True, metavar="FILE",
        help="files, patterns, folders, URLs of them: .jsonl, .json, .gz, .zst, .parquet; - is standard input",
    )  # fmt: skip
    group.add_argument(
        "--output-prefix", required=True, metavar="PATH", help="writes PATH_KEY_document.bin, .idx and .meta.json"
    )
    group.add_argument(
        "--work-folder", metavar="DIR",
        help="local folder for the output before its upload, if --output-prefix is a URL (./NAME-....upload)",
    )  # fmt: skip
    group.add_argument("--overwrite", action="store_true", help="replace an existing output, or an interrupted run")
    group.add_argument("--resume", action="store_true", help="continue an interrupted run; finished parts are kept")
    group.add_argument(
        "--dataset-impl", choices=("lazy", "cached", "mmap"), default="mmap", help="kind of index (mmap)"
    )
    group.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="action for a line without a valid document (stop)",
    )
    group.add_argument(
        "--max-skip-fraction",
        type=fraction,
        default=1.0,
        metavar="X",
        help="largest share of bad lines with --on-error skip (1: any)",
    )


def _add_text_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY",
        help="JSON keys of the text; one dataset per key; meta.text is the key text within meta (text)",
    )  # fmt: skip
    group.add_argument("--append-eod", action="store_true", help="put an end-of-document token after each document")
    group.add_argument(
        "--split-sentences", action="store_true", help="make a sequence of each sentence; writes PATH_KEY_sentence"
    )
    group.add_argument("--keep-newlines", action="store_true", help="keep line ends, with --split-sentences")
    group.add_argument("--lang", metavar="NAME", help="language of the text, with --split-sentences (english)")


def _add_tokenizer_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tokenizer-type", metavar="NAME", help="GPT2BPETokenizer, HuggingFaceTokenizer, ...")
    group.add_argument("--vocab-file", "--vocab", metavar="FILE", help="vocab.json of GPT-2, or vocab.txt of BERT")
    group.add_argument("--merge-file", "--merges-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    group.add_argument("--tokenizer-model", metavar="PATH", help="tokenizer.json or its folder, .model, ranks")
    group.add_argument(
        "--vocab-size", type=integer(1, INT32), metavar="N", help="vocabulary size of NullTokenizer or TikTokenizer"
    )
    group.add_argument("--tiktoken-pattern", choices=("v1", "v2"), help="pre-tokenization pattern of TikTokenizer (v2)")
    group.add_argument(
        "--tiktoken-num-special-tokens", type=integer(3, INT32), default=1000, metavar="N",
        help="number of special ids of TikTokenizer, before those of its ranks file (1000)",
    )  # fmt: skip
    group.add_argument(
        "--tiktoken-special-tokens", "--tokenizer-special-tokens", nargs="+", metavar="TOKEN",
        help="names of the first ids of TikTokenizer; for other tokenizers, tokens that must exist",
    )  # fmt: skip
    group.add_argument(
        "--null-tokenizer-eod-id",
        type=integer(0, INT32),
        metavar="N",
        help="end-of-document id of NullTokenizer (the value of --vocab-size)",
    )
    group.add_argument(
        "--encoder", choices=("auto", "fast", "exact"), default="auto",
        help="encoder; auto: the fast one if it is installed and gives equal ids (auto)",
    )  # fmt: skip


def _add_run_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workers",
        type=integer(1, MOST_PROCESSES),
        default=usable_cpus(),
        metavar="N",
        help="processes (one for each core)",
    )
    group.add_argument(
        "--chunk-size", type=integer(1), metavar="N", help="most documents encoded at a time (about 1 MB of text)"
    )
    group.add_argument(
        "--log-interval", type=integer(1), metavar="N",
        help="documents between progress lines (1000, at most a line per second)",
    )  # fmt: skip
    group.add_argument("--keep-sequential-samples", action="store_true", help="no-op: order is always kept")


def _add_trial_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--find-optimal-num-workers",
        action="store_true",
        help="measure the speed with different --workers, print it, and write no dataset",
    )
    group.add_argument(
        "--workers-to-check",
        type=integer(1, MOST_PROCESSES),
        nargs="+",
        metavar="N",
        help="numbers of workers to measure (1, 2, 4, ... to all cores)",
    )
    group.add_argument("--max-documents", type=integer(1), metavar="N", help="documents per measurement (100000)")


def _add_partition_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rank", type=integer(0, LARGEST_WORLD), metavar="I", help="write partition I of --world (from 0)"
    )
    group.add_argument(
        "--world", type=integer(1, LARGEST_WORLD), metavar="N", help="number of partitions, one for each machine"
    )
    group.add_argument(
        "--partitions", type=integer(1, LARGEST_WORLD), metavar="N",
        help="with --rank: the same as --world; without --rank: no-op, because all --workers share the files",
    )  # fmt: skip


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    arguments = build_parser().parse_known_flags([_with_dashes(word) for word in argv])
    _check(arguments)
    return arguments


def settings_and_folder(arguments: argparse.Namespace) -> "tuple[PreprocessSettings, Path | None]":
    """Returns the settings, and the local folder if the output is a URL."""
    world = _world(arguments)
    if arguments.keep_sequential_samples:
        print("--keep-sequential-samples: no-op; documents always keep their order", file=sys.stderr)
    if arguments.tiktoken_pattern is not None and arguments.tokenizer_type != "TikTokenizer":
        without = "has no effect without --tokenizer-type TikTokenizer"
        print_line(f"--tiktoken-pattern {arguments.tiktoken_pattern}: {without}", sys.stderr)
    from megatron.preprocess.options import PreprocessSettings
    from megatron.tokenizer import TokenizerSettings

    settings = PreprocessSettings(
        **{
            **fields_from(arguments, PreprocessSettings),
            "inputs": tuple(arguments.input),
            "tokenizer": TokenizerSettings(**fields_from(arguments, TokenizerSettings)),
            "language": arguments.lang or "english",
            "rank": arguments.rank or 0,
            "world": world,
        }
    )
    return settings, None if arguments.work_folder is None else Path(arguments.work_folder)


def find_workers(arguments: argparse.Namespace, settings: "PreprocessSettings", folder: Path | None) -> None:
    from megatron.preprocess.trials import try_workers

    local = Path() if "://" in settings.output_prefix else Path(settings.output_prefix).parent
    trials = try_workers(
        settings,
        arguments.workers_to_check or powers_of_two(usable_cpus()),
        max_documents=arguments.max_documents or 100_000,
        folder=local if folder is None else folder,
    )
    print(f"{trials[0].documents} documents each time, fastest first:")
    for trial in trials:
        rates = f"{trial.documents_per_second:12.1f} docs/s {trial.megabytes_per_second:9.2f} MB/s"
        print(f"--workers {trial.workers:<4d} {rates}")
    print(
        f"--workers {trials[0].workers} is the fastest; no dataset was written; run again without "
        "--find-optimal-num-workers"
    )


def powers_of_two(most: int) -> list[int]:
    """Returns 1, 2, 4, ... and `most`."""
    return sorted({*(1 << n for n in range(most.bit_length())), most})


def _with_dashes(word: str) -> str:
    """Replaces underscores in a flag by dashes, because older Megatron scripts spell flags with underscores."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word


def _world(arguments: argparse.Namespace) -> int:
    """Returns the number of partitions; this run writes one of them."""
    if arguments.rank is None:
        if arguments.world not in (None, 1):
            raise ConfigError(f"--world {arguments.world}: --rank is missing; give each partition its number from 0")
        if arguments.partitions is not None and arguments.partitions > 1:
            print_line(
                f"--partitions {arguments.partitions}: no-op; all --workers share the files and the output is the "
                "same. With --rank, one of these partitions is written",
                sys.stderr,
            )
        return 1
    if arguments.world and arguments.partitions and arguments.world != arguments.partitions:
        raise ConfigError(
            f"--partitions {arguments.partitions}: --world is {arguments.world}; give one of the two with --rank"
        )
    world: int | None = arguments.world or arguments.partitions
    if world is None:
        raise ConfigError(f"--rank {arguments.rank}: --world is missing; give the number of partitions")
    if arguments.rank >= world:
        raise ConfigError(f"--rank {arguments.rank}: there are {world} partitions; give 0 to {world - 1}")
    return world


def _check(arguments: argparse.Namespace) -> None:
    keys = arguments.json_keys
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"--json-keys {' '.join(keys)}: {key} is given twice; name each key once")
        if "/" in key or "\0" in key:
            raise ConfigError(f"--json-keys {key}: a key with a slash cannot be part of a file name; rename the key")
    prefix = arguments.output_prefix
    if not prefix or prefix.endswith(os.sep):
        raise ConfigError(f"--output-prefix {prefix}: is a folder; add the name of the dataset: {prefix}corpus")
    if arguments.work_folder is not None and "://" not in prefix:
        raise ConfigError(
            f"--work-folder {arguments.work_folder}: only used with a URL as --output-prefix; remove the flag"
        )
    if arguments.on_error == "stop" and arguments.max_skip_fraction != 1.0:
        raise ConfigError(
            f"--max-skip-fraction {arguments.max_skip_fraction:g}: only used with --on-error skip; add it"
        )
    if arguments.resume and arguments.overwrite:
        raise ConfigError("--resume: --overwrite starts anew and --resume continues; give one of the two")
    trials = (("--workers-to-check", arguments.workers_to_check), ("--max-documents", arguments.max_documents))
    for flag, value in trials:
        if value is not None and not arguments.find_optimal_num_workers:
            shown = value if isinstance(value, int) else " ".join(map(str, value))
            raise ConfigError(f"{flag} {shown}: only used with --find-optimal-num-workers; add it, or remove {flag}")
    for flag, given in (("--keep-newlines", arguments.keep_newlines), ("--lang", arguments.lang)):
        if given and not arguments.split_sentences:
            raise ConfigError(f"{flag}: only used with --split-sentences; add it, or remove {flag}")


def print_summary(report: "Report") -> None:
    if not report.keys:
        return
    for key in report.keys:
        totals = key.totals
        per_token = totals.text_bytes / max(totals.tokens, 1)
        print_line(
            f"{key.prefix}: {totals.documents} documents, {totals.tokens} tokens ({key.dtype}), "
            f"{per_token:.2f} bytes per token, longest document {totals.longest} tokens, {totals.empty} empty"
        )
    if report.blank_lines:
        print(f"blank lines skipped: {report.blank_lines}")
    for kind, count in sorted(report.bad_lines.items()):
        print_line(f"bad lines skipped: {count} ({kind})")
    if report.engine:
        print(f"encoder: {report.engine}")
    print_line(
        f"{report.documents} documents in {report.seconds:.1f} s: {report.documents / report.seconds:.1f} docs/s, "
        f"{report.megabytes_per_second:.2f} MB/s"
    )

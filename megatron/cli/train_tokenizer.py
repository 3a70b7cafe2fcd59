"""The command line of tools/train_tokenizer.py: learns vocab.json and merges.txt of a GPT-2 style BPE."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.errors import ConfigError, DataError, StorageError
from megatron.utils.command_line import Parser, integer, run_tool
from megatron.utils.log import print_line
from megatron.utils.numerals import INT32

if TYPE_CHECKING:
    from megatron.preprocess.input.files import InputFile
    from megatron.preprocess.progress import ProgressDisplay

NAME = "train_tokenizer.py"
FILES = ("vocab.json", "merges.txt")


def main(argv: Sequence[str] | None = None) -> int:
    return run_tool(NAME, lambda: _train(build_parser().parse_known_flags(argv)))


def build_parser() -> Parser:
    parser = Parser(prog=NAME, description="Learns a byte-level BPE (vocab.json, merges.txt) from JSON lines.")
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON lines or arrays, parquet; files, patterns, folders, .gz, .zst; - is standard input",
    )
    parser.add_argument("--json-key", default="text", metavar="KEY", help="the key of the text (text)")
    parser.add_argument(
        "--vocab-size",
        type=integer(1, INT32),
        required=True,
        metavar="N",
        help="number of tokens, including the 256 bytes and <|endoftext|>",
    )
    parser.add_argument("--output-dir", required=True, metavar="DIR", help="folder for vocab.json and merges.txt")
    parser.add_argument(
        "--min-frequency",
        type=integer(1),
        default=2,
        metavar="N",
        help="least number of occurrences of a merged pair (2)",
    )
    parser.add_argument(
        "--log-interval", type=integer(1), default=1000, metavar="N", help="documents between progress lines (1000)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    return parser


def _train(arguments: argparse.Namespace) -> None:
    directory = Path(arguments.output_dir)
    _refuse_file_on_the_way(directory)
    for name in FILES:
        if (directory / name).exists() and not arguments.overwrite:
            raise ConfigError(f"--output-dir {directory}: {name} exists; give --overwrite to replace it")
    from megatron.preprocess.input.files import expand_inputs, input_bytes
    from megatron.preprocess.progress import ProgressDisplay
    from megatron.tokenizer.export import bpe_file_texts, write_files
    from megatron.tokenizer.train import train_bpe

    files = expand_inputs(arguments.input)
    with ProgressDisplay(input_bytes(files), arguments.log_interval) as progress:
        texts = _texts(files, arguments.json_key, progress)
        bpe = train_bpe(
            texts, arguments.vocab_size, min_frequency=arguments.min_frequency, show_progress=sys.stderr.isatty()
        )
    if not progress.documents:
        raise DataError(f"--input {' '.join(arguments.input)}: holds no documents; nothing was written")
    try:
        write_files(directory, bpe_file_texts(bpe))
    except StorageError as error:
        raise StorageError(f"--output-dir {error}; give another folder") from None
    if bpe.vocab_size < arguments.vocab_size:
        print_line(
            f"{NAME}: --vocab-size {arguments.vocab_size}: this text only gives {bpe.vocab_size} tokens (pairs seen at "
            f"least {arguments.min_frequency} times); give more text or a smaller size",
            sys.stderr,
        )
    print_line(
        f"{directory}: {bpe.vocab_size} tokens, {len(bpe.merges)} merges from {progress.documents} documents in "
        f"{progress.seconds:.1f} s; end of document is id {bpe.eod_id}"
    )


def _refuse_file_on_the_way(directory: Path) -> None:
    for path in (directory, *directory.parents):
        if path.is_file():
            raise ConfigError(f"--output-dir {directory}: {path} is a file; give a folder")


def _texts(sources: "Sequence[InputFile]", key: str, progress: "ProgressDisplay") -> Iterator[str]:
    """Yields the texts. A line without text raises a DataError with its file and line."""
    from megatron.preprocess.input.segments import plan_segments, read_batches
    from megatron.utils.plain_text import conversion

    path, before = "", 0
    for segment in plan_segments(sources):
        if segment.source.path != path:
            path, before = segment.source.path, 0
        for batch in read_batches(segment, [key]):
            if batch.bad:
                bad = batch.bad[0]
                way_out = "correct the line"
                if bad.kind == "key missing":
                    way_out = f"give the text's key with --json-key, not {key}"
                elif bad.kind == "not JSON":
                    way_out = conversion(segment.source.path) or way_out
                raise DataError(f"{segment.source.place(before + bad.number - batch.first_line + 1)}: {bad}; {way_out}")
            for _, texts in batch.documents:
                yield from texts[0]
            before += batch.lines
            progress.update(documents=len(batch.documents), tokens=0, read=batch.size, position=segment.position)

"""tools/train_tokenizer.py: vocab.json and merges.txt of a GPT-2 style BPE from JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.config.tool import Parser, integer, run_tool
from megatron.errors import ConfigError, DataError, StorageError

NAME = "train_tokenizer.py"
FILES = ("vocab.json", "merges.txt")
LINES_AT_A_TIME = 512


def main(argv: Sequence[str] | None = None) -> int:
    return run_tool(NAME, lambda: _train(sys.argv[1:] if argv is None else argv))


def build_parser() -> Parser:
    parser = Parser(prog=NAME, description="Learns a byte-level BPE (vocab.json, merges.txt) from JSON lines.")
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="JSON lines; patterns and .gz too")
    parser.add_argument("--json-key", default="text", metavar="KEY", help="the key of the text (text)")
    parser.add_argument(
        "--vocab-size", type=integer(1), required=True, metavar="N", help="tokens, bytes and <|endoftext|> included"
    )
    parser.add_argument("--output-dir", required=True, metavar="DIR", help="where vocab.json and merges.txt go")
    parser.add_argument(
        "--min-frequency", type=integer(1), default=2, metavar="N", help="a pair seen less often is not merged (2)"
    )
    parser.add_argument(
        "--log-interval", type=integer(1), default=1000, metavar="N", help="documents between progress lines (1000)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    return parser


def _train(argv: Sequence[str]) -> None:
    arguments = build_parser().parse_known_flags(argv)
    directory = Path(arguments.output_dir)
    _refuse_file_on_the_way(directory)
    for name in FILES:
        if (directory / name).exists() and not arguments.overwrite:
            raise ConfigError(f"--output-dir {directory}: {name} exists; give --overwrite to replace it")
    from megatron.preprocess.progress import Progress
    from megatron.preprocess.reader import expand_inputs, input_bytes
    from megatron.tokenizer.export import bpe_file_texts, write_files
    from megatron.tokenizer.train import train_bpe

    files = expand_inputs(arguments.input)
    with Progress(input_bytes(files), arguments.log_interval) as progress:
        texts = _texts(files, arguments.json_key, progress)
        bpe = train_bpe(
            texts,
            arguments.vocab_size,
            min_frequency=arguments.min_frequency,
            show_progress=sys.stderr.isatty(),
        )
    if not progress.documents:
        raise DataError(f"--input {' '.join(arguments.input)}: holds no documents; nothing was written")
    try:
        write_files(directory, bpe_file_texts(bpe))
    except StorageError as error:
        raise StorageError(f"--output-dir {error}; give another folder") from None
    if bpe.vocab_size < arguments.vocab_size:
        print(
            f"{NAME}: --vocab-size {arguments.vocab_size}: this text only gives {bpe.vocab_size} tokens (pairs seen at "
            f"least {arguments.min_frequency} times); give more text or a smaller size",
            file=sys.stderr,
        )
    print(
        f"{directory}: {bpe.vocab_size} tokens, {len(bpe.merges)} merges from {progress.documents} documents in "
        f"{progress.seconds:.1f} s; end of document is id {bpe.eod_id}"
    )


def _refuse_file_on_the_way(directory: Path) -> None:
    for path in (directory, *directory.parents):
        if path.is_file():
            raise ConfigError(f"--output-dir {directory}: {path} is a file; give a folder")


def _texts(files: Sequence[Path], key: str, progress: object) -> Iterator[str]:
    """The texts, streaming; a line that holds none ends the job with its place."""
    from megatron.preprocess.documents import LineError, parse_line
    from megatron.preprocess.progress import Progress
    from megatron.preprocess.reader import read_chunks

    assert isinstance(progress, Progress)
    for chunk in read_chunks(files, LINES_AT_A_TIME):
        documents = 0
        for number, line in enumerate(chunk.lines, start=chunk.first_line):
            try:
                found = parse_line(line, [key])
            except LineError as error:
                detail = f" ({error.detail})" if error.detail else ""
                way_out = f"name it with --json-key, not {key}" if error.kind == "key missing" else "correct the line"
                raise DataError(f"{chunk.path}:{number}: {error.kind}{detail}; {way_out}") from None
            if found is not None:
                documents += 1
                yield from found[0]
        progress.update(documents=documents, tokens=0, read=chunk.size, position=chunk.position)

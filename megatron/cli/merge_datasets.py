"""The command line of tools/merge_datasets.py."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from megatron.errors import ConfigError
from megatron.utils.command_line import Parser, run_tool
from megatron.utils.log import print_line
from megatron.utils.progress import ByteProgress

if TYPE_CHECKING:
    from megatron.data.merge import MergeResult

NAME = "merge_datasets.py"


def build_parser() -> Parser:
    parser = Parser(
        prog=NAME,
        description="Concatenates datasets: the partitions of one run in the order of their ranks, others by name. "
        "If partitions have several keys, each key becomes a dataset PATH_KEY_document.",
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="DIR_OR_PREFIX",
        help="folders, prefixes, patterns or URLs of datasets",
    )
    parser.add_argument("--output-prefix", required=True, metavar="PATH", help="writes PATH.bin, .idx and .meta.json")
    parser.add_argument("--work-folder", metavar="DIR", help="folder for local copies of URLs (here)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    parser.add_argument("--dataset-impl", choices=("lazy", "cached", "mmap"), help="kind of index (as in the inputs)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return run_tool(NAME, lambda: merge_inputs(build_parser().parse_known_flags(argv)))


def merge_inputs(arguments: argparse.Namespace) -> None:
    output = arguments.output_prefix
    if not output or output.endswith(os.sep) or Path(output).is_dir():
        raise ConfigError(f"--output-prefix {output}: is a folder; add the name of the dataset")
    from megatron.data.remote import is_url

    if not any(is_url(word) for word in (*arguments.input, output)):
        if arguments.work_folder is not None:
            raise ConfigError(f"--work-folder {arguments.work_folder}: only used with URLs; remove the flag")
        for merged in _merge(arguments, arguments.input, output):
            _print(merged, merged.summary.prefix)
        return
    from megatron.data.remote import refuse_secrets
    from megatron.data.remote_pairs import beside, fetch_words, put_pair, refuse_existing_urls

    refuse_secrets(output)
    with temporary_folder(arguments.work_folder) as folder:
        local = str(folder / output.rpartition("/")[2]) if is_url(output) else output
        if is_url(output) and not arguments.overwrite:
            refuse_existing_urls(output, [output])
        for merged in _merge(arguments, fetch_words(arguments.input, folder), local):
            place = merged.summary.prefix
            if is_url(output):
                place = beside(output, place)
                if not arguments.overwrite:
                    refuse_existing_urls(output, [place])  # the keys' names are known only now
                put_pair(merged.summary.prefix, place)
            _print(merged, place)


@contextmanager
def temporary_folder(given: str | None) -> Iterator[Path]:
    """Yields a temporary folder in `given` (default: the current folder), and removes it with its content."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(TemporaryDirectory(prefix="megatron-", suffix=".work", dir=given or "."))
        except OSError as error:
            raise ConfigError(
                f"--work-folder {given or '.'}: cannot be used ({error.strerror}); give another folder"
            ) from None
        yield Path(folder)


def _merge(arguments: argparse.Namespace, inputs: Sequence[str], output: str) -> "list[MergeResult]":
    from megatron.data.merge import merge  # imported here, so that --help does not load numpy
    from megatron.data.parts import find_prefixes, plan_groups

    groups = plan_groups(find_prefixes(inputs, output), output)
    show = ByteProgress("merged").show
    return merge(groups, overwrite=arguments.overwrite, impl=arguments.dataset_impl, on_bytes=show)


def _print(merged: "MergeResult", prefix: str) -> None:
    written = merged.summary
    print_line(
        f"{prefix}: {merged.parts} datasets merged, {written.documents} documents, {written.sequences} "
        f"sequences, {written.tokens} tokens ({written.dtype})"
    )
    for note in merged.notes:
        print_line(f"{prefix}: {note}", sys.stderr)

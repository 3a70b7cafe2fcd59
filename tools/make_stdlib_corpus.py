"""Writes the Python standard library of this machine as a small code corpus, with one JSON object per line.

    python tools/make_stdlib_corpus.py --output corpus.json

The text is under `content` (or --json-key), the file's name under `path`. The files are shuffled with a fixed seed,
because --split divides a corpus by position, and each part should have all topics.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that is not installed

from megatron.errors import ConfigError, DataError, StorageError
from megatron.utils.command_line import Parser, integer, number, run_tool

# Tests are repetitive, and lookup tables and bundled wheels are not useful code.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "_bundled"}


def source_files(library: Path) -> list[Path]:
    def is_wanted(path: Path) -> bool:
        return not LEFT_OUT.intersection(path.relative_to(library).parts)

    return sorted(path for path in library.rglob("*.py") if is_wanted(path))


def documents(library: Path, seed: int, key: str) -> Iterator[dict[str, str]]:
    paths = source_files(library)
    random.Random(seed).shuffle(paths)
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a few files are Latin-1 on purpose; they are skipped
        if text.strip():
            yield {"path": path.relative_to(library).as_posix(), key: text}


def write_corpus(library: Path, output: Path, *, max_megabytes: float, seed: int, key: str) -> tuple[int, int]:
    """Writes a temporary file and renames it, so that a file with the final name is always complete."""
    temporary = output.with_name(output.name + ".tmp")
    count = size = 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with temporary.open("w", encoding="utf-8") as file:
        for document in documents(library, seed, key):
            if size >= max_megabytes * 1e6:
                break
            file.write(json.dumps(document) + "\n")
            count += 1
            size += len(document[key])
    temporary.replace(output)
    return count, size


def main() -> int:
    return run_tool("error", make)


def make() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON-lines file to write")
    parser.add_argument("--json-key", default="content", metavar="KEY", help="the key of the text (content)")
    parser.add_argument("--max-megabytes", type=number, default=float("inf"), help="stop after this much text")
    parser.add_argument("--seed", type=integer(0), default=1234, help="seed of the order of the files (1234)")
    args = parser.parse_known_flags(sys.argv[1:])
    if not args.max_megabytes > 0:
        raise ConfigError(f"--max-megabytes {args.max_megabytes}: nothing would be written; give a number above 0")
    if args.json_key in ("", "path"):
        raise ConfigError(
            f"--json-key {args.json_key!r}: must not be empty or path, the key of the file's name; give another key"
        )
    if args.output.is_dir():
        raise ConfigError(f"--output {args.output}: is a directory; name a file in it")
    library = Path(sysconfig.get_paths()["stdlib"])
    try:
        count, size = write_corpus(
            library, args.output, max_megabytes=args.max_megabytes, seed=args.seed, key=args.json_key
        )
    except OSError as error:
        raise StorageError(f"--output {args.output}: cannot be written ({error.strerror}); name another file") from None
    if not count:
        raise DataError(f"no Python sources under {library}: this Python was installed without them; use another one")
    print(f"{args.output}: {count} files of the standard library, {size / 1e6:.1f} MB of text")


if __name__ == "__main__":
    sys.exit(main())

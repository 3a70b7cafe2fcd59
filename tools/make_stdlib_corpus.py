"""Makes a small code corpus out of the Python standard library that is on this machine: one JSON object a line.

    python tools/make_stdlib_corpus.py --output corpus.json

The text is under `content`, the file's name under `path`. Files stand in an order shuffled by a fixed seed, so that a
split by position (Megatron's way) does not cut the library by topic.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Tests repeat themselves; lookup tables and bundled wheels are no code to learn from.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "_bundled"}


def source_files(library: Path) -> list[Path]:
    def is_wanted(path: Path) -> bool:
        return not LEFT_OUT.intersection(path.relative_to(library).parts)

    return sorted(path for path in library.rglob("*.py") if is_wanted(path))


def documents(library: Path, seed: int) -> Iterator[dict[str, str]]:
    paths = source_files(library)
    random.Random(seed).shuffle(paths)
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a few files are Latin-1 on purpose; a corpus of the rest is as good
        if text.strip():
            yield {"path": path.relative_to(library).as_posix(), "content": text}


def write_corpus(library: Path, output: Path, *, max_megabytes: float, seed: int) -> tuple[int, int]:
    """Writes beside the target and renames, so that a file with the final name is always whole."""
    temporary = output.with_name(output.name + ".tmp")
    count = size = 0
    output.parent.mkdir(parents=True, exist_ok=True)
    with temporary.open("w", encoding="utf-8") as file:
        for document in documents(library, seed):
            if size >= max_megabytes * 1e6:
                break
            file.write(json.dumps(document) + "\n")
            count += 1
            size += len(document["content"])
    temporary.replace(output)
    return count, size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON-lines file to write")
    parser.add_argument("--max-megabytes", type=float, default=float("inf"), help="stop after this much text")
    parser.add_argument("--seed", type=int, default=1234, help="of the order of the files")
    args = parser.parse_args()
    library = Path(sysconfig.get_paths()["stdlib"])
    count, size = write_corpus(library, args.output, max_megabytes=args.max_megabytes, seed=args.seed)
    if not count:
        print(f"error: no Python sources under {library}: this Python was installed without them", file=sys.stderr)
        return 11
    print(f"{args.output}: {count} files of the standard library, {size / 1e6:.1f} MB of text")
    return 0


if __name__ == "__main__":
    sys.exit(main())

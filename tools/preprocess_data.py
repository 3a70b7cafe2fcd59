"""Converts JSON lines to .bin/.idx datasets; see `--help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that is not installed

if __name__ == "__main__":
    from megatron_anywhere import run

    sys.exit(run("preprocess_data"))

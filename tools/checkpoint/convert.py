"""Prints the command that replaces Megatron-LM's tool of this name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # runs from a checkout that is not installed

if __name__ == "__main__":
    from megatron.compat.renamed_tools import main, script_name

    sys.exit(main(script_name(__file__)))

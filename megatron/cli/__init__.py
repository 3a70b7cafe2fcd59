"""Command lines of tools/, one file per tool. Printing `--help` does not import torch."""

import megatron_anywhere

"""The command lines of tools/, a file each. None of them imports torch to print its `--help`."""

import megatron_anywhere

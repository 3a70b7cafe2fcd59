"""The command lines of tools/, a file each; `--help` of every one answers without torch."""

"""The command lines of tools/. Importing it loads nothing."""

"""What the user may set. Importing this loads neither torch nor numpy; `--help` is fast."""

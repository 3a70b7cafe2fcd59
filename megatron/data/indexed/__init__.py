"""Reads, writes and verifies .bin/.idx datasets and their records. Importing this package loads nothing."""

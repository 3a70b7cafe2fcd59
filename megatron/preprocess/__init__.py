"""Turns text files into .bin/.idx datasets. Importing this package loads nothing."""

"""Turns .bin/.idx files into batches of tokens. Only the loader imports torch."""

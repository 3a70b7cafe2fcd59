"""Turns .bin/.idx files into batches of tokens. Only `loader` imports torch at module level."""

"""From .bin/.idx files to batches of tokens. Only the loader imports torch."""

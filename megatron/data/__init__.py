"""Which tokens are trained on: from .bin/.idx files to batches. Nothing here imports torch but the loader."""

"""Imports from and exports to `transformers`, by the families of `families/`. Importing this package loads nothing."""

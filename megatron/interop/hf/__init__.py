"""Import from and export to `transformers`: the families of `families/`. Importing this package loads nothing."""

"""From text files to .bin/.idx datasets. Importing this package loads nothing."""

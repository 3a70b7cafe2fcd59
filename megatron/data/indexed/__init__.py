"""The .bin/.idx files of a dataset: reading, writing, checksums, the record beside them. Importing it loads nothing."""

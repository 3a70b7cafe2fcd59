"""Reads input files as batches of documents. Importing this package loads nothing."""

"""From input files to batches of documents. Importing it loads nothing."""

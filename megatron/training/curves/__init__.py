"""Loss curves of runs: read from the metrics file or from the log, drawn as a PNG or in the terminal."""

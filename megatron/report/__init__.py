"""Tables and pictures of the output of runs: loss curves, results, pipeline steps."""

"""Tables and pictures of what runs have written: loss curves, results, pipeline steps."""

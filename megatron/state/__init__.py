"""Where elements live: which part of a parameter a rank holds, updates and saves. Names and integers only."""

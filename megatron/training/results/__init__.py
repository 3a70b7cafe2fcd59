"""What runs came to, samples/s and perplexity, read from their metrics files: a table and a picture."""

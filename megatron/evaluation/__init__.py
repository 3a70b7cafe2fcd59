"""Evaluates trained models: perplexity, LAMBADA, multiple choice, and EleutherAI's harness. Importing this package
loads nothing."""

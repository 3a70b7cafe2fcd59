"""Implements `--profile`: traces a window of iterations with PyTorch's profiler, and prints where their time went."""

"""Implements `--profile`: traces a window of iterations with PyTorch's profiler, and prints how their time is divided
over kinds of operations."""

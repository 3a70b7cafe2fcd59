"""`--profile`: a window of iterations traced with the profiler of PyTorch, and tables of where their time went."""

"""Checkpoints: Megatron's classic tree, files that execute no code, and a manifest that checks every byte."""

"""Reads and writes other programs' files: Hugging Face's models (`hf/`), Megatron-LM's checkpoints (`megatron_lm/`)."""

"""Files of other programs, both ways: Hugging Face's models (`hf/`), Megatron-LM's checkpoints (`megatron_lm/`)."""

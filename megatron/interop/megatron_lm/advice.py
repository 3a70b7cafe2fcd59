"""Fixes for errors in checkpoints of Megatron-LM."""

NOT_A_GPT = "give a step of a GPT that Megatron-LM saved"
SAVE_AGAIN = "save it again with the program that wrote it"

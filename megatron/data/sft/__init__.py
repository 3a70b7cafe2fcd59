"""Conversations as training data (--sft): JSONL files of messages, encoded once, packed into samples."""

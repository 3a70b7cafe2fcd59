"""Converts text to ids and back. Importing this package loads neither torch nor `tokenizers`."""

from megatron.tokenizer.base import END_OF_TEXT, EncoderDifference, Tokenizer, TokenizerSettings
from megatron.tokenizer.selection import build_tokenizer

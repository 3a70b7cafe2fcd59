"""Small folders of every kind of tokenizer that a run can have and an export holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from megatron.tokenizer.bert import BertWordPieceTokenizer
from megatron.tokenizer.bpe_files import BPE
from megatron.tokenizer.export import write_gpt2_folder
from megatron.tokenizer.gpt2 import GPT2BPETokenizer
from tests.unit.tokenizer.support import SAMPLES, small_bpe, write_small_bpe

Make = Callable[[Path], None]
END = "<|endoftext|>"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def save(folder: Path, rust: Any, config: dict[str, Any] | None) -> None:
    (folder / "tokenizer.json").write_text(rust.to_str(pretty=True))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


def byte_level(pattern: str | None, added: list[AddedToken | str], *, prefix: bool = False, nfc: bool = False) -> Any:
    bpe = small_bpe()
    vocab = {token: index for token, index in bpe.vocab.items() if token != END}
    vocab = {token: number for number, token in enumerate(vocab)}
    rust = Tokenizer(models.BPE(vocab=vocab, merges=bpe.merges))
    words = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=pattern is None)
    rust.pre_tokenizer = (
        words if pattern is None else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), words])
    )
    if nfc:
        rust.normalizer = normalizers.NFC()
    rust.decoder = decoders.ByteLevel()
    rust.post_processor = processors.ByteLevel(trim_offsets=False)
    for token in added:
        one = AddedToken(token, special=True, normalized=False) if isinstance(token, str) else token
        (rust.add_special_tokens if one.special else rust.add_tokens)([one])
    return rust


def gpt2(folder: Path) -> None:
    given = folder / "given"
    vocab, merges = write_small_bpe(given)
    GPT2BPETokenizer(vocab, merges).save_pretrained(folder)
    vocab.unlink(), merges.unlink(), given.rmdir()


def gpt2_without_end(folder: Path) -> None:
    bpe = small_bpe()
    write_gpt2_folder(folder, BPE({t: i for i, t in enumerate(t for t in bpe.vocab if t != END)}, bpe.merges), None)


def llama3(folder: Path) -> None:
    rust = byte_level(LLAMA3, ["<|begin|>", "<|end|>", "<|eot|>", "<|reserved|>"])
    begin = [("<|begin|>", rust.token_to_id("<|begin|>"))]
    template = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A <|begin|> $B", special_tokens=begin
    )
    rust.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    save(folder, rust, {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>"})


def qwen2(folder: Path) -> None:
    rust = byte_level(QWEN2, [END, "<|im_start|>", "<|im_end|>", AddedToken("<tool>", special=False)], nfc=True)
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": END, "bos_token": None}
    save(folder, rust, config | {"add_bos_token": False, "add_prefix_space": False, "errors": "replace"})


def qwen2_without_padding(folder: Path) -> None:
    save(folder, byte_level(QWEN2, ["<end>"], nfc=True), {"eos_token": "<end>"})


def roberta(folder: Path) -> None:
    mask = AddedToken("<mask>", lstrip=True, special=True, normalized=False)
    rust = byte_level(None, ["<s>", "</s>", "<pad>", mask], prefix=True)
    ids = [(token, rust.token_to_id(token)) for token in ("</s>", "<s>")]
    rust.post_processor = processors.RobertaProcessing(*ids, trim_offsets=True, add_prefix_space=True)
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "mask_token": "<mask>"}
    save(folder, rust, {"tokenizer_class": "RobertaTokenizer", **roles})


def llama2(folder: Path) -> None:
    rust = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    rust.train_from_iterator(SAMPLES * 3, trainer)
    description = json.loads(rust.to_str())
    description["added_tokens"] = description["added_tokens"][:3]
    rust = Tokenizer.from_str(json.dumps(description))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    rust.decoder = decoders.Sequence(parts)
    rust.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "legacy": True}
    save(folder, rust, {**config, "bos_token": "<s>", "eos_token": "</s>", "unk_token": {"content": "<unk>"}})


def unigram(folder: Path) -> None:
    rust = Tokenizer(models.Unigram())
    rust.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Metaspace()
    special = ["<unk>", "<pad>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False)
    rust.train_from_iterator(SAMPLES * 3, trainer)
    save(
        folder,
        rust,
        {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"},
    )


def bert(folder: Path) -> None:
    vocab = folder / "words.txt"
    letters = sorted(set("".join(SAMPLES).lower()) - set(" \n\t"))
    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", *letters, *(f"##{letter}" for letter in letters), "hello"]
    vocab.write_text("\n".join(words), encoding="utf-8")
    BertWordPieceTokenizer(vocab, lower_case=True).save_pretrained(folder)
    vocab.unlink()


def word_level(folder: Path) -> None:
    rust = Tokenizer(models.WordLevel({"[unk]": 0, "a": 1, "one": 2, "two": 3}, unk_token="[unk]"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    save(folder, rust, None)


def contradictions(folder: Path) -> None:
    """The small files name tokens that tokenizer.json lacks, and describe others differently."""
    rust = byte_level(LLAMA3, [AddedToken("<eos>", special=False), AddedToken("<x>", special=False, lstrip=True)])
    rust.enable_padding(pad_token="<nowhere>", pad_id=7000)
    rust.enable_truncation(4)
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<eos>", "pad_token": "[PAD]", "add_bos_token": True}
    config |= {"add_prefix_space": True, "clean_up_tokenization_spaces": True, "split_special_tokens": True}
    config |= {"additional_special_tokens": ["<more>"], "bos_token": "<new>", "unk_token": "<x>"}
    save(folder, rust, config)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "a", "cls_token": "<cls>"}))
    (folder / "added_tokens.json").write_text(json.dumps({"<far>": 9000}))


KINDS: dict[str, Make] = {
    "gpt2": gpt2,
    "gpt2 without an end": gpt2_without_end,
    "llama3": llama3,
    "qwen2": qwen2,
    "qwen2 without padding": qwen2_without_padding,
    "roberta": roberta,
    "llama2": llama2,
    "unigram": unigram,
    "bert": bert,
    "word level": word_level,
    "contradictions": contradictions,
}

"""HuggingFaceTokenizer: any tokenizer.json from a local folder. No hub, no remote code, no `transformers`.

Two differences from `transformers` are intended. The text of a special token inside a document is plain text. No token
such as BOS is added to a document; only --append-eod adds an end of document.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron.errors import ConfigError, DataError
from megatron.tokenizer.base import (
    END_OF_TEXT,
    Encoder,
    Ids,
    Tokenizer,
    TokenizerOptions,
    library_errors,
    package,
    refuse_surrogates,
)
from megatron.tokenizer.bpe_files import BPE, check_ids, merge_pair, read_text
from megatron.tokenizer.byte_lengths import Lengths, by_decoding, bytes_of_fallback, of_alphabet
from megatron.tokenizer.export import config_text, write_files
from megatron.tokenizer.fast.guard import build_guarded
from megatron.tokenizer.identity import earlier_fingerprint, fingerprint, steps
from megatron.utils.foreign import tokenizer_on_hub

SETTING = "--tokenizer-model"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
KEPT_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
)


def kept_files(folder: Path) -> dict[str, Path]:
    """Returns name -> path of a folder's tokenizer files. Imports, checkpoints and exports copy them."""
    files = {name: folder / name for name in KEPT_FILES if (folder / name).is_file()}
    for path in files.values():
        refuse_outside(folder, path)
    return files


def refuse_outside(folder: Path, path: Path) -> None:
    """Rejects a file that links out of its folder, because its content would be copied into checkpoints."""
    home = folder.resolve()
    roots = [home]
    if home.parent.name == "snapshots":  # in a Hugging Face cache, files link to the folder of blobs
        roots.append(home.parent.parent / "blobs")
    target = path.resolve()
    if not any(target.is_relative_to(root) for root in roots):
        raise ConfigError(
            f"{path} is a link to {target}, outside of its folder: its content would be copied into checkpoints; "
            "copy the file into the folder if that is intended"
        )


class HuggingFaceTokenizer(Tokenizer):
    name = "HuggingFaceTokenizer"

    def __init__(
        self,
        tokenizer_model: str | Path,
        *,
        encoder: Encoder = "exact",
        announce: bool = True,
        only: Collection[str] | None = None,
    ) -> None:
        """Opens the tokenizer. `only` names the files to read (None: all files of the folder)."""
        self._only = only
        self._json_file = find_json(Path(tokenizer_model))
        self._description = read_json(self._json_file)
        self._rust = load_tokenizers(self._json_file)
        vocabulary = self._rust.get_vocab(with_added_tokens=True)
        check_ids(vocabulary, f"{SETTING} {self._json_file}")
        self.eod_token = self._find_eod_token()
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod_id = None if self.eod_token is None else self._rust.token_to_id(self.eod_token)
        self._make_special_text_plain()
        self._fast = build_guarded(
            self.name,
            lambda: self._description,
            self._encode_exactly,
            encoder=encoder,
            eod_token=self.eod_token,
            announce=announce,
        )
        self.engine = "exact" if self._fast is None else "fast, guarded"

    @classmethod
    def from_settings(cls, config: TokenizerOptions, *, encoder: Encoder, announce: bool) -> "HuggingFaceTokenizer":
        return cls(config.tokenizer_model or "", encoder=encoder, announce=announce)

    def token_id(self, token: str) -> int | None:
        return self._rust.token_to_id(token)

    def beginning(self) -> tuple[int, ...]:
        """Returns the tokens that the post-processor of tokenizer.json puts before a text, as in `transformers`."""
        text = self._rust.encode("a", add_special_tokens=False).ids
        whole = self._rust.encode("a", add_special_tokens=True).ids
        before = next((n for n in range(len(whole)) if whole[n : n + len(text)] == text), 0)
        return tuple(whole[:before])

    def _why_no_eod(self) -> str:
        if self.eod_token is None:
            return (
                f"{SETTING} {self._json_file.parent}: no eos_token in tokenizer_config.json; add it there, as the "
                "end-of-document token"
            )
        return (
            f"{SETTING} {self._json_file.parent}: eos_token {self.eod_token!r} is not in the "
            "vocabulary; correct eos_token"
        )

    def _find_eod_token(self) -> str | None:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            beside = self._json_file.with_name(name)
            counts = beside.exists() and (self._only is None or name in self._only)
            token = text_of_token(read_json(beside).get("eos_token")) if counts else None
            if token is not None:
                return token
        return END_OF_TEXT if self._rust.token_to_id(END_OF_TEXT) is not None else None

    def _make_special_text_plain(self) -> None:
        from tokenizers import AddedToken

        if self.eod_id is not None and any(
            token["content"] == self.eod_token for token in self._description.get("added_tokens") or ()
        ):
            # Some files list their eos as an ordinary added token, which would match text.
            self._rust.add_special_tokens([AddedToken(self.eod_token, special=True, normalized=False)])
        self._rust.encode_special_tokens = True

    @property
    def fingerprint(self) -> str:
        return self.fingerprints[0]

    @cached_property
    def fingerprints(self) -> tuple[str, ...]:
        as_gpt2 = _as_gpt2(self._description, self.eod_token)
        # The ids equal those of GPT2BPETokenizer, so the fingerprint does too.
        if as_gpt2 is None:
            today = fingerprint(self._description, self.eod_token, self._rust.token_to_id)
        else:
            today = as_gpt2.fingerprint()
        return today, earlier_fingerprint(self._description, self.eod_token)

    def tokenize(self, text: str) -> list[int]:
        refuse_surrogates(text)
        ids = self._encode_exactly(text)
        self._refuse_eod([ids])
        return ids.tolist()

    @cached_property
    def _spelling(self) -> Any:
        return load_spelling(self._json_file)

    def tokenize_special(self, text: str) -> list[int]:
        refuse_surrogates(text)
        with library_errors(self._encoding_failed):
            return list(self._spelling.encode(text, add_special_tokens=False).ids)

    def _encode_exactly(self, text: str) -> Ids:
        # Encoding one text at a time starts no threads, which would not survive a later fork.
        with library_errors(self._encoding_failed):
            return np.array(self._rust.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def _encoding_failed(self, reason: str) -> DataError:
        return DataError(
            f"{SETTING} {self._json_file}: the tokenizers package fails on a text ({reason}); correct the file, or "
            "skip the text"
        )

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        if self._fast is not None:
            arrays = self._fast.encode_batch(texts)
        else:
            arrays = self._encode_batch_exactly(texts)
        if self._can_spell_eod:
            self._refuse_eod(arrays)
        return arrays

    def _encode_batch_exactly(self, texts: Sequence[str]) -> list[Ids]:
        with library_errors(self._encoding_failed):
            try:
                encodings = self._rust.encode_batch_fast(texts, add_special_tokens=False)
            except (TypeError, UnicodeEncodeError):
                for text in texts:
                    refuse_surrogates(text)
                raise
        return [np.fromiter(encoding.ids, dtype=np.int32) for encoding in encodings]

    @cached_property
    def _can_spell_eod(self) -> bool:
        """True if a text may encode to the end-of-document id, for example because a merge produces its token."""
        model = self._description.get("model") or {}
        if self.eod_id is None:
            return False
        vocab, token = model.get("vocab"), self.eod_token
        if model.get("type") != "BPE" or not isinstance(vocab, dict):
            return True
        if self.eod_id not in vocab.values():
            return False
        made = any("".join(merge_pair(merge)) == token for merge in model.get("merges") or ())
        return made or bool(model.get("ignore_merges")) or len(token or "") < 2

    def _refuse_eod(self, arrays: Sequence[Ids]) -> None:
        if self.eod_id is not None and any((ids == self.eod_id).any() for ids in arrays):
            # A Unigram model, without byte alphabet and pre-tokenization pattern, can encode text to its own eos.
            raise DataError(
                f"{self.name}: this vocabulary encodes the text {self.eod_token!r} to the end-of-document id; "
                "remove it from the text"
            )

    def detokenize(self, ids: Iterable[int]) -> str:
        with library_errors(self._encoding_failed):
            return self._rust.decode(list(ids), skip_special_tokens=False)

    def byte_lengths(self) -> Lengths | None:
        vocab = self._rust.get_vocab(with_added_tokens=True)
        added = self._rust.get_added_tokens_decoder()
        known = {index: 0 if token.special else len(token.content.encode("utf-8")) for index, token in added.items()}
        if self.eod_id is not None:
            known[self.eod_id] = 0
        if "ByteLevel" in _kinds(self._description.get("decoder")):
            lengths = of_alphabet(vocab, self.vocab_size)
            lengths[list(known)] = list(known.values())
            return lengths
        letters = (
            index for token, index in vocab.items() if token.isascii() and token.isalpha() and index not in added
        )
        anchor = next(letters, None)
        if anchor is None:
            return None
        return by_decoding(self.vocab_size, self.detokenize, anchor, bytes_of_fallback(vocab.items()) | known)

    def files(self) -> dict[str, Path]:
        kept = {**kept_files(self._json_file.parent), KEPT_FILES[0]: self._json_file}
        return {name: path for name, path in kept.items() if self._only is None or name in self._only}

    def save_pretrained(self, directory: str | Path, *, model_max_length: int | None = None) -> None:
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if self.eod_token is not None:
            config["eos_token"] = self.eod_token
        files = self.files()
        if "tokenizer_config.json" in files:
            config = read_json(files.pop("tokenizer_config.json"))
        config.pop("auto_map", None)  # names Python files, which are neither loaded nor copied
        files.pop("tokenizer.model", None)  # binary; tokenizer.json has the same content
        texts = {name: read_text(path, SETTING) for name, path in files.items()}
        texts["tokenizer_config.json"] = config_text(config, model_max_length)
        write_files(Path(directory), texts)


def text_of_token(described: Any) -> str | None:
    """Returns the text of a token, which a file stores as text or as an object with `content`; otherwise None."""
    text = described.get("content") if isinstance(described, dict) else described
    return text if isinstance(text, str) else None


def named_tokens(json_file: Path, only: Collection[str] | None = None) -> dict[str, str]:
    """Returns role -> special token (bos_token, ...) from the files beside tokenizer.json. `only`: names of the files
    to read."""
    names: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        path = json_file.with_name(file)
        described = read_json(path) if path.is_file() and (only is None or file in only) else {}
        found = {role: text_of_token(described.get(role)) for role in ROLES}
        names |= {role: token for role, token in found.items() if token is not None}
    return names


def load_spelling(json_file: Path) -> Any:
    """Opens the tokenizer as `transformers` does: text that spells a special token becomes that token. This includes
    tokens that only the files beside tokenizer.json name."""
    from tokenizers import AddedToken

    rust = load_tokenizers(json_file)
    listed = {token.content for token in rust.get_added_tokens_decoder().values()}
    missing = [token for token in dict.fromkeys(named_tokens(json_file).values()) if token not in listed]
    known = [token for token in missing if rust.token_to_id(token) is not None]
    rust.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in known])
    return rust


def find_json(given: Path) -> Path:
    if given.is_file():
        if given.suffix == ".json":
            return given
        raise ConfigError(f"{SETTING} {given}: not a .json file; give a tokenizer.json, or its folder")
    if not given.is_dir():
        raise ConfigError(
            f"{SETTING} {given}: there is no such file or folder; nothing is downloaded automatically; download the "
            "tokenizer's "
            f"folder first{tokenizer_on_hub(str(given))}"
        )
    path = given / "tokenizer.json"
    if path.is_file():
        return path
    if (given / "vocab.json").is_file() and (given / "merges.txt").is_file():
        raise ConfigError(
            f"{SETTING} {given}: has no tokenizer.json; use --tokenizer-type GPT2BPETokenizer --vocab-file "
            f"{given / 'vocab.json'} --merge-file {given / 'merges.txt'}"
        )
    raise ConfigError(
        f"{SETTING} {given}: has no tokenizer.json, the only supported format; give a folder with a tokenizer.json"
    )


def read_json(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path, SETTING)
        content = json.loads(text)
        if "\\u" in text:  # half of a surrogate pair is valid JSON, but not valid text
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{SETTING} {path}: not JSON ({error}); give the original file") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{SETTING} {path}: not a JSON object; give the original file")
    return content


def load_tokenizers(path: Path) -> Any:
    made = package("tokenizers", HuggingFaceTokenizer.name)
    with library_errors(
        lambda reason: ConfigError(
            f"{SETTING} {path}: the tokenizers package cannot open it ({reason}); give a valid tokenizer.json"
        )
    ):
        rust = made.Tokenizer.from_file(str(path))
    _refuse_random(rust, path)
    rust.no_truncation()  # a limit stored in the file would silently truncate documents
    rust.no_padding()
    return rust


def _refuse_random(rust: Any, path: Path) -> None:
    """Rejects a tokenizer whose ids for a text are random, because data could not be reproduced."""
    if dropout := getattr(rust.model, "dropout", None):
        raise ConfigError(
            f"{SETTING} {path}: its model has dropout {dropout:g}, so the ids of a text are random; set dropout to "
            "null in that file"
        )
    normalize, found = rust.normalizer.normalize_str if rust.normalizer else str, dict[str, Any]()
    for token in rust.get_added_tokens_decoder().values():
        other = found.setdefault(normalize(token.content), token) if token.normalized else token
        if other is not token and not (other.special and token.special):
            raise ConfigError(
                f"{SETTING} {path}: its normalizer makes the added tokens {other.content!r} and {token.content!r} "
                "equal, and the library picks one at random; remove one, or set its 'normalized' to false in that file"
            )


def _kinds(part: Any) -> set[str]:
    """Returns the types in a part of tokenizer.json, which may be a sequence."""
    if not isinstance(part, dict):
        return set()
    return {str(part.get("type"))}.union(*map(_kinds, part.get("decoders") or ()))


def _as_gpt2(description: dict[str, Any], eod_token: str | None) -> BPE | None:
    """Returns the vocabulary and merges if the file describes exactly GPT2BPETokenizer's encoding."""
    model = description.get("model") or {}
    words = steps(description.get("pre_tokenizer"))
    pre = words[0] if len(words) == 1 else {}
    added = description.get("added_tokens") or []
    vocab = model.get("vocab")
    plain = (
        model.get("type", "BPE") == "BPE"
        and "merges" in model
        and not any(model.get(option) for option in ("dropout", "unk_token", "ignore_merges", "byte_fallback"))
        and not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
        and not steps(description.get("normalizer"))
        and pre.get("type") == "ByteLevel"
        and not pre.get("add_prefix_space")
        and pre.get("use_regex", True)
    )
    if not plain or not isinstance(vocab, dict) or eod_token not in (None, END_OF_TEXT):
        return None
    if any(vocab.get(token.get("content")) != token.get("id") or not token.get("special") for token in added):
        return None
    return BPE(vocab, [merge_pair(merge) for merge in model.get("merges") or ()])

"""tokenizer.json folders: ours opened by `transformers`, theirs opened by us."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from megatron.errors import ConfigError, DataError, StorageError
from megatron.preprocess.options import PreprocessSettings
from megatron.preprocess.run import preprocess
from megatron.tokenizer import TokenizerSettings
from megatron.tokenizer.gpt2 import GPT2BPETokenizer
from megatron.tokenizer.huggingface import HuggingFaceTokenizer, load_spelling
from tests.unit.tokenizer.support import NASTY, SAMPLES, write_small_bpe


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> GPT2BPETokenizer:
    return GPT2BPETokenizer(*write_small_bpe(tmp_path_factory.mktemp("bpe")))


@pytest.fixture(scope="module")
def exported(gpt2: GPT2BPETokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("export") / "new" / "folder"
    gpt2.save_pretrained(directory, model_max_length=77)
    return directory


def edit_json(path: Path, change: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


# ---------------------------------------------------------------- our export


@pytest.fixture(scope="module")
def auto(exported: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(exported)


def test_transformers_opens_the_export(gpt2: GPT2BPETokenizer, auto: Any) -> None:
    assert auto.model_max_length == 77
    assert len(auto) == gpt2.vocab_size
    assert auto.eos_token == auto.bos_token == auto.unk_token == "<|endoftext|>"
    assert auto.eos_token_id == gpt2.eod
    assert auto("<|endoftext|>").input_ids == [gpt2.eod]  # there, by its own rule, special text is special


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
def test_transformers_encodes_and_decodes_alike(gpt2: GPT2BPETokenizer, auto: Any, text: str) -> None:
    if "<|endoftext|>" not in text:
        ids = gpt2.tokenize(text)
        assert auto(text).input_ids == ids
        assert auto.decode(ids) == text == gpt2.detokenize(ids)


@pytest.mark.parametrize("text", [text for text in (*NASTY, *SAMPLES) if "<|endoftext|>" not in text])
def test_transformers_agrees_on_known_troubles(gpt2: GPT2BPETokenizer, auto: Any, text: str) -> None:
    ids = gpt2.tokenize(text)
    assert auto(text).input_ids == ids and auto.decode(ids) == text


def test_transformers_can_save_it_again(auto: Any, gpt2: GPT2BPETokenizer, tmp_path: Path) -> None:
    auto.save_pretrained(tmp_path)
    again = HuggingFaceTokenizer(tmp_path)
    assert again.tokenize(SAMPLES[0]) == gpt2.tokenize(SAMPLES[0]) and again.eod == gpt2.eod


def test_the_export_is_the_same_bytes_again(gpt2: GPT2BPETokenizer, exported: Path, tmp_path: Path) -> None:
    gpt2.save_pretrained(tmp_path, model_max_length=77)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "vocab.json",
        "merges.txt",
    }
    assert all((tmp_path / name).read_bytes() == (exported / name).read_bytes() for name in names)


def test_the_exported_files_are_the_tokenizer_again(gpt2: GPT2BPETokenizer, exported: Path) -> None:
    again = GPT2BPETokenizer(exported / "vocab.json", exported / "merges.txt")
    assert again.fingerprint == gpt2.fingerprint


def test_a_folder_that_cannot_be_written_is_named(gpt2: GPT2BPETokenizer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file"):
        gpt2.save_pretrained(tmp_path / "file" / "folder")


# ---------------------------------------------------------------- opening a folder


def test_our_export_opens_as_the_same_tokenizer(gpt2: GPT2BPETokenizer, exported: Path) -> None:
    for given_path in (exported, exported / "tokenizer.json"):
        opened = HuggingFaceTokenizer(given_path)
        assert opened.fingerprint == gpt2.fingerprint  # data made with one may be trained on with the other
        assert (opened.vocab_size, opened.eod) == (gpt2.vocab_size, gpt2.eod)
        for text in NASTY:  # special-token text included
            assert opened.tokenize(text) == gpt2.tokenize(text)
            assert opened.detokenize(gpt2.tokenize(text)) == text


def test_the_fingerprint_ignores_formatting_and_old_merge_spelling(exported: Path, tmp_path: Path) -> None:
    def older(content: dict[str, Any]) -> None:
        content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
        content["pre_tokenizer"]["use_regex"] = True
        content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}

    HuggingFaceTokenizer(exported).save_pretrained(tmp_path)
    edit_json(tmp_path / "tokenizer.json", older)
    opened = HuggingFaceTokenizer(tmp_path)
    assert opened.fingerprint == HuggingFaceTokenizer(exported).fingerprint
    assert len(opened.tokenize(SAMPLES[0])) > 4, "a stored truncation must not cut documents"


def word_level(directory: Path, config: dict[str, Any] | None, **options: Any) -> Path:
    vocab = {"a": 0, "b": 1, "[BOS]": 2, "</s>": 3, "[UNK]": 4}
    tokenizer = RustTokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    around = [("[BOS]", 2), ("</s>", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[BOS] $A </s>", special_tokens=around)
    tokenizer.add_special_tokens(["[BOS]"])
    for token in options.get("added", ()):
        tokenizer.add_tokens([token])
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "lstrip": False}])
def test_eos_comes_from_the_config_and_nothing_is_put_around_a_text(tmp_path: Path, eos: Any) -> None:
    opened = HuggingFaceTokenizer(word_level(tmp_path, {"eos_token": eos}))
    assert opened.eod == 3 and opened.vocab_size == 5
    assert opened.tokenize("a b") == [0, 1]


def test_eos_comes_from_the_special_tokens_map_too(tmp_path: Path) -> None:
    word_level(tmp_path, {})
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}', encoding="utf-8")
    assert HuggingFaceTokenizer(tmp_path).eod == 3


def test_an_eos_listed_as_an_ordinary_token_is_still_not_matched_in_text(tmp_path: Path) -> None:
    token = AddedToken("<END>", special=False, normalized=False)
    opened = HuggingFaceTokenizer(word_level(tmp_path, {"eos_token": "<END>"}, added=[token]))
    assert opened.eod == 5
    assert opened.tokenize("a<END>b") == [4]  # one unknown word, as any other


def test_a_vocabulary_whose_text_can_spell_eos_refuses_that_text(tmp_path: Path) -> None:
    opened = HuggingFaceTokenizer(word_level(tmp_path, {"eos_token": "</s>"}))
    with pytest.raises(DataError, match="encodes the text '</s>' to the end-of-document id"):
        opened.tokenize("a </s> b")


def test_eod_is_refused_where_none_is_named(tmp_path: Path) -> None:
    opened = HuggingFaceTokenizer(word_level(tmp_path / "a", None))
    assert opened.eod_id is None
    with pytest.raises(ConfigError, match=r"no eos_token in tokenizer_config.json"):
        _ = opened.eod
    with pytest.raises(ConfigError, match="'<nope>' is not in the vocabulary"):
        _ = HuggingFaceTokenizer(word_level(tmp_path / "b", {"eos_token": "<nope>"})).eod


def test_saving_copies_the_files_and_drops_remote_code(tmp_path: Path) -> None:
    config = {"eos_token": "</s>", "auto_map": {"AutoTokenizer": ["evil.py", None]}}
    source = word_level(tmp_path / "in", config)
    opened = HuggingFaceTokenizer(source)
    opened.save_pretrained(tmp_path / "out", model_max_length=9)
    kept = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert kept == {"eos_token": "</s>", "model_max_length": 9}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert HuggingFaceTokenizer(tmp_path / "out").fingerprint == opened.fingerprint
    assert set(opened.files()) == {"tokenizer.json", "tokenizer_config.json"}


def test_a_link_out_of_the_folder_is_not_copied(exported: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not yours")
    folder = tmp_path / "theirs"
    shutil.copytree(exported, folder)
    (folder / "chat_template.jinja").symlink_to("../secret")
    with pytest.raises(ConfigError, match=r"chat_template.jinja is a link to .*secret, outside of its folder"):
        HuggingFaceTokenizer(folder).save_pretrained(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_links_of_a_hugging_face_cache_are_followed(exported: Path, tmp_path: Path) -> None:
    model = tmp_path / "models--someone--model"
    blobs, snapshot = model / "blobs", model / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True), snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(exported.iterdir())):
        shutil.copyfile(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", str(number)))
    tokenizer = HuggingFaceTokenizer(snapshot)
    assert tokenizer.fingerprint == HuggingFaceTokenizer(exported).fingerprint
    tokenizer.save_pretrained(tmp_path / "copy")
    assert not any(path.is_symlink() for path in (tmp_path / "copy").iterdir())


def test_another_eos_is_another_fingerprint(tmp_path: Path) -> None:
    one = HuggingFaceTokenizer(word_level(tmp_path / "a", {"eos_token": "</s>"}))
    other = HuggingFaceTokenizer(word_level(tmp_path / "b", {"eos_token": "[UNK]"}))
    assert one.fingerprint != other.fingerprint


def test_what_cannot_be_opened_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer-model gpt2: there is no such file .* nothing is downloaded"):
        HuggingFaceTokenizer("gpt2")
    with pytest.raises(ConfigError, match=r"has no tokenizer.json"):
        HuggingFaceTokenizer(tmp_path)
    write_small_bpe(tmp_path)
    with pytest.raises(ConfigError, match="use --tokenizer-type GPT2BPETokenizer --vocab-file"):
        HuggingFaceTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="the tokenizers package cannot open it"):
        HuggingFaceTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="not JSON"):
        HuggingFaceTokenizer(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(ConfigError, match=r"give a tokenizer.json, or its folder"):
        HuggingFaceTokenizer(tmp_path / "tokenizer.model")


# ---------------------------------------------------------------- a file from a stranger


def test_one_huge_id_is_refused_in_both_formats(exported: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    edit_json(folder / "vocab.json", lambda vocab: vocab.update({"<|endoftext|>": 2**31}))
    with pytest.raises(
        ConfigError, match=r"vocab.json: '<\|endoftext\|>' has the id 2147483648, but there are \d+ tokens"
    ):
        GPT2BPETokenizer(folder / "vocab.json", folder / "merges.txt", encoder="fast")
    edit_json(folder / "tokenizer.json", lambda content: content["model"]["vocab"].update({"unused": 2**31}))
    with pytest.raises(ConfigError, match=r"tokenizer.json: 'unused' has the id 2147483648, but there are"):
        HuggingFaceTokenizer(folder)


class PanicException(BaseException):
    """Imitates the exception of Rust libraries."""


def test_a_panic_of_the_library_is_one_line(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = HuggingFaceTokenizer(exported)

    class Panics:
        def __getattr__(self, name: str) -> Any:
            def panic(*given: Any, **options: Any) -> Any:
                raise PanicException("called `Option::unwrap()`\non a `None` value")

            return panic

    monkeypatch.setattr(tokenizer, "_rust", Panics())
    for act in (lambda: tokenizer._encode_exactly("a"), lambda: tokenizer._encode_batch_exactly(["a"])):
        with pytest.raises(
            DataError, match=r"the tokenizers package fails on a text \(called `Option::unwrap\(\)` on a `None`"
        ):
            act()


def test_a_vocabulary_without_its_unknown_token_is_one_line(tmp_path: Path) -> None:
    RustTokenizer(models.WordPiece({"a": 0}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"tokenizer.json: the tokenizers package fails on a text \(.*UNK"):
        HuggingFaceTokenizer(tmp_path).tokenize("b")


# ---------------------------------------------------------------- ids that are random


@pytest.mark.parametrize("dropout", [0.1, 1.0])
def test_dropout_in_the_file_is_refused(dropout: float, exported: Path, tmp_path: Path) -> None:
    """The library would drop merges at random, even without training."""
    folder = Path(shutil.copytree(exported, tmp_path / "copy"))
    edit_json(folder / "tokenizer.json", lambda content: content["model"].update(dropout=dropout))
    rust = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    assert dropout == 1 or len({tuple(rust.encode(SAMPLES[0]).ids) for _ in range(20)}) > 1
    lacks = (
        rf"^--tokenizer-model \S+tokenizer.json: its model has dropout {dropout:g}, so .* set dropout to null in that"
    )
    settings = TokenizerSettings(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    with pytest.raises(ConfigError, match=lacks):
        preprocess(
            PreprocessSettings(inputs=("in.jsonl",), output_prefix=str(tmp_path / "out"), tokenizer=settings), print
        )
    with pytest.raises(ConfigError, match=lacks):
        load_spelling(folder / "tokenizer.json")
    for none in (0.0, None):
        edit_json(folder / "tokenizer.json", lambda content, none=none: content["model"].update(dropout=none))
        assert HuggingFaceTokenizer(folder).fingerprint == HuggingFaceTokenizer(exported).fingerprint


def added_pair(folder: Path, *, normalized: bool) -> Path:
    """Two added tokens that the normalizer maps to one text."""
    tokens = [AddedToken("<A>", normalized=True), AddedToken("<a>", normalized=normalized)]
    word_level(folder, None, added=tokens)
    edit_json(folder / "tokenizer.json", lambda content: content.update(normalizer={"type": "Lowercase"}))
    return folder


def test_two_added_tokens_with_one_text_are_refused(tmp_path: Path) -> None:
    """The library picks one of them, a different one each time it opens the file."""
    folder = added_pair(tmp_path / "a", normalized=True)
    opened = (RustTokenizer.from_file(str(folder / "tokenizer.json")) for _ in range(60))
    assert len({tuple(rust.encode("<a>", add_special_tokens=False).ids) for rust in opened}) == 2
    with pytest.raises(ConfigError, match=r"the added tokens '<A>' and '<a>' equal, and the library picks .* false"):
        HuggingFaceTokenizer(folder)
    assert HuggingFaceTokenizer(added_pair(tmp_path / "b", normalized=False)).tokenize("<A>") == [5]

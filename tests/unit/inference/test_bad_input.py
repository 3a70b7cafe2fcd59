"""Any mistake in the input gives one line before a weight is read, and nothing is written."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.errors import ConfigError, DataError, MegatronError
from megatron.inference.model import Subject
from megatron.inference.prompts import Chat, encoded_chats
from megatron.inference.text_stream import TextStream
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.chat.template import ChatError
from megatron.tokenizer.export import bpe_file_texts, write_files
from megatron.tokenizer.train import train_bpe
from tests.helpers.runs import generate_here
from tests.unit.cli.test_evaluate import assert_said, load  # noqa: F401  (a fixture)
from tests.unit.tokenizer.support import SAMPLES

LONG = " ".join(SAMPLES)
FILES: dict[str, tuple[bytes | None, tuple[str, ...], str]] = {
    "an empty file": (b" \n", (), "a.jsonl: is empty"),
    "no UTF-8": (b"caf\xe9", (), r"a.jsonl: not UTF-8 \(byte 0xe9 at 3\)"),
    "no JSON": (b"{", (), "a.jsonl line 1: not JSON"),
    "no file": (None, (), "--prompts .*a.jsonl: cannot be read"),
    "another key": (b'{"text": "x"}', (), "line 1: has no text under 'prompt' .*--json-key"),
    "no token": (b'{"prompt": "x"}\n{"prompt": ""}', (), "line 2: an empty prompt"),
    "no messages": (b'{"prompt": "x"}', ("--chat",), "a.jsonl, line 1: no messages; a line must be"),
    "an answer at the end": (
        b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}',
        ("--chat",),
        "line 1: ends with an answer of the assistant; remove its last message",
    ),
    "an empty file of chats": (b" ", ("--chat",), "a.jsonl: is empty"),
    "a prompt too long": (json.dumps({"prompt": LONG}).encode(), (), "line 1: .*16 positions.*--truncate-prompts"),
    "too many tokens": (b'{"prompt": "x"}', ("--max-new-tokens", "16"), r"16: with .* line 1 of 1 tokens .* for 15"),
}
WORDS: dict[str, tuple[tuple[str, ...], str]] = {
    "a negative number": (("--prompt", "x", "--max-new-tokens", "-3"), "--max-new-tokens: -3 is less than 1"),
    "no batch": (("--prompt", "x", "--batch-size", "0"), "--batch-size: 0 is less than 1"),
    "a negative temperature": (("--prompt", "x", "--temperature", "-1"), "--temperature -1.0: must be at least 0.0001"),
    "two sources": (("--prompt", "x", "--prompts", "y"), "--prompt: --prompts is given too"),
    "a key without a file": (
        ("--prompt", "x", "--json-key", "y"),
        "--json-key: has no effect unless --prompts is a file of JSON",
    ),
    "a key and chats": (
        ("--chat", "--prompts", "y.jsonl", "--json-key", "y"),
        "--json-key: with --chat, the key is always messages",
    ),
    "a part of a chat": (("--chat", "--prompt", "x", "--truncate-prompts"), "--truncate-prompts: .* or --chat"),
    "special tokens twice": (
        ("--chat", "--prompt", "x", "--prompt-with-special-tokens"),
        "--prompt-with-special-tokens: the chat template writes",
    ),
    "a chat without a template": (("--chat", "--prompt", "x"), "has no chat template .chat_template.jinja"),
    "an empty stop text": (("--prompt", "x", "--stop", ""), "--stop: the text is empty"),
    "drawing and beams": (("--prompt", "x", "--num-beams", "2", "--top-k", "3"), "--num-beams 2: .* does not sample"),
    "stops and beams": (("--prompt", "x", "--num-beams", "2", "--stop", "y"), "--num-beams 2: --stop does not work"),
    "a penalty alone": (
        ("--prompt", "x", "--length-penalty", "2"),
        "--length-penalty 2.0: has no effect without beam search",
    ),
    "a penalty of nothing": (
        ("--prompt", "x", "--num-beams", "2", "--length-penalty", "nan"),
        "--length-penalty: 'nan' is not a finite number",
    ),
    "a penalty of all": (
        ("--prompt", "x", "--num-beams", "2", "--length-penalty", "-200"),
        "--length-penalty -200.0: must be from -10 to 10",
    ),
    "next to no temperature": (("--prompt", "x", "--temperature", "1e-45"), "--temperature 1e-45: must be at least"),
    "a directory that is not there": (("--prompt", "x", "--output", "/nowhere/x"), "there is no directory /nowhere"),
    "the root": (("--prompt", "x", "--output", "/"), "--output /: is a directory"),
}


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Subject, "built", property(lambda self: pytest.fail("the weights were read")))


def told(capsys: pytest.CaptureFixture[str]) -> str:
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("error", "warning"))]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("what", FILES)
def test_a_bad_file_is_one_line(what: str, load: Path, tmp_path: Path, capsys: Any) -> None:  # noqa: F811
    content, words, message = FILES[what]
    file, out = tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    if content is not None:
        file.write_bytes(content)
    assert generate_here("--load", load, "--prompts", file, "--output", out, *words) in (2, 11)
    assert_said(told(capsys), message)
    assert not out.exists()


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("what", WORDS)
def test_a_bad_flag_is_one_line(what: str, load: Path, capsys: Any) -> None:  # noqa: F811
    words, message = WORDS[what]
    assert generate_here("--load", load, *words) == 2
    assert_said(told(capsys), message)


def test_log_probabilities_need_a_file(load: Path, capsys: Any) -> None:  # noqa: F811
    assert generate_here("--load", load, "--prompt", "x", "--logprobs") == 2
    assert_said(told(capsys), "--logprobs: .*--output")


def test_the_tokenizer_of_another_model_is_named(load: Path, tmp_path: Path, capsys: Any) -> None:  # noqa: F811
    write_files(tmp_path, bpe_file_texts(train_bpe(["another text"] * 3, 260)))
    own = ["--vocab-file", tmp_path / "vocab.json", "--merge-file", tmp_path / "merges.txt"]
    assert generate_here("--load", load, "--prompt", "x", *own) == 11
    assert_said(
        told(capsys), r"fingerprint [0-9a-f]{12}\) is not the model's .*; token .* has id .* in the model's and ids? "
    )


@pytest.mark.parametrize(("place", "kind"), [("--prompt", ConfigError), ("a.jsonl, line 1", DataError)])
def test_a_conversation_that_the_template_refuses_is_a_setting_or_data(place: str, kind: type[MegatronError]) -> None:
    def refuses(*_: Any) -> Any:
        raise ChatError("roles must alternate")

    for prompt, why in (
        (refuses, "roles must alternate"),
        (lambda *_: ("", ()), "the chat template gives an empty text"),
    ):
        encoder: Any = SimpleNamespace(prompt=prompt)
        with pytest.raises(kind) as caught:
            encoded_chats([Chat(place, ({"role": "user", "content": "x"},), None)], encoder, positions=8, new_tokens=1)
        assert type(caught.value) is kind and str(caught.value).startswith(f"{place}: {why}")


def test_lines_of_standard_input_are_prompts_and_long_ones_are_cut_on_request(
    load: Path,  # noqa: F811
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long = LONG.replace("\n", " ")
    stream = SimpleNamespace(buffer=io.BytesIO(f"for i\r\n\n{long}\n".encode()), isatty=lambda: False)
    monkeypatch.setattr("sys.stdin", stream)
    assert generate_here("--load", load, "--max-new-tokens", 3, "--greedy", "--truncate-prompts") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("for i") and f"\n{long}" in shown


# ---------------------------------------------------------------- text as it comes


def streamed(tokenizer: Tokenizer, text: str, stops: tuple[str, ...] = ()) -> list[str]:
    stream, pieces = TextStream(tokenizer, tokenizer.tokenize("é"), stops), []
    for token in tokenizer.tokenize(text):
        ended = stream.add(token)
        pieces.append(stream.new_text())
        if ended:
            break
    stream.finish()
    return [*pieces, stream.new_text()]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    from megatron.tokenizer import TokenizerSettings, build_tokenizer
    from tests.unit.tokenizer.support import write_small_bpe

    vocab, merges = write_small_bpe(tmp_path)
    named = {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": str(vocab), "merge_file": str(merges)}
    return build_tokenizer(TokenizerSettings(**named), announce=False)


def test_whole_characters_come_and_all_of_them(tokenizer: Tokenizer) -> None:
    text = "naïve 😀 東京\n x"
    pieces = streamed(tokenizer, text)
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    assert sum(map(bool, pieces)) > 4, "as they come"


def test_a_prompt_of_single_bytes_is_not_cut_within_a_character(tmp_path: Path) -> None:
    """Chinese text in Llama 2's vocabulary shows this: `tokenizers` decodes no byte after a cut character."""
    tokenizer = bytes_alone(tmp_path)
    for prompt in ("é", "東京都", "aé東京都", "é" * 9, "🙂東😀"):
        stream = TextStream(tokenizer, tokenizer.tokenize(prompt), ("首",))
        for token in tokenizer.tokenize("は日本の首都"):
            if stream.add(token):
                break
        assert stream.stopped and stream.text == "は日本の", prompt


def bytes_alone(folder: Path) -> Tokenizer:
    """A tokenizer whose tokens are single bytes; `tokenizers` decodes no byte of a run with a wrong one."""
    from megatron.tokenizer import TokenizerSettings, build_tokenizer

    vocab = {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    bpe = {"type": "BPE", "unk_token": "<unk>", "byte_fallback": True, "vocab": vocab, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "decoder": decoder, "model": bpe}))
    settings = TokenizerSettings(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    return build_tokenizer(settings, announce=False)


@pytest.mark.parametrize("content", [b"a\xc3\xa9\xff", b"\xc3\xa9\xff\xc3\xa9", b"ok\xe6\x9d", b"\xffplain"])
def test_the_text_of_wrong_bytes_is_that_of_all_tokens_together(content: bytes, tmp_path: Path) -> None:
    tokenizer = bytes_alone(tmp_path)
    tokens = [2 + byte for byte in content]
    stream = TextStream(tokenizer)
    for token in tokens:
        stream.add(token)
    stream.finish()
    assert stream.text == tokenizer.detokenize(tokens)


def test_no_space_is_lost_behind_spaces(tmp_path: Path) -> None:
    """SentencePiece with default normalization drops all spaces at the beginning of decoded text."""
    pytest.importorskip("sentencepiece")
    from megatron.tokenizer import TokenizerSettings, build_tokenizer
    from tests.unit.tokenizer.support import train_pieces

    named = {
        "tokenizer_type": "GPTSentencePieceTokenizer",
        "tokenizer_model": str(train_pieces(tmp_path / "pieces.model")),
    }
    tokenizer = build_tokenizer(TokenizerSettings(**named), announce=False)
    mark, word = tokenizer.token_id("\u2581"), tokenizer.tokenize("the")
    assert mark is not None
    tokens = [*word, mark, mark, *word, mark, *word]
    stream, shown = TextStream(tokenizer), ""
    for token in tokens:
        stream.add(token)
        shown += stream.new_text()
    stream.finish()
    assert shown + stream.new_text() == stream.text == tokenizer.detokenize(tokens)


def test_a_character_that_never_becomes_whole_is_told_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    stream.add(tokenizer.tokenize("😀")[0])
    assert stream.new_text() == ""
    stream.finish()
    assert set(stream.new_text()) == {"\ufffd"}


@pytest.mark.parametrize("stop", ["quick", "k b", "The", "ick brown fox", "東京"])
def test_a_stop_text_ends_before_itself_wherever_tokens_end(stop: str, tokenizer: Tokenizer) -> None:
    text = "The quick brown fox 東京 quick quack"
    pieces = streamed(tokenizer, text, ("quack!", stop))
    assert "".join(pieces) == text[: text.index(stop)]


def test_what_only_begins_a_stop_text_is_text(tokenizer: Tokenizer) -> None:
    assert "".join(streamed(tokenizer, "quick qu", ("quack", "ququ"))) == "quick qu"


def test_a_stop_text_that_is_cut_late_is_seen(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextStream, "_may_be_a_stop", lambda self: 0)
    with pytest.raises(AssertionError):
        test_a_stop_text_ends_before_itself_wherever_tokens_end("ick brown fox", tokenizer)

"""Ids of a conversation, and which belong to answers: those of `transformers`, or of prefixes by hand."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.config import TokenizerConfig
from megatron.errors import ConfigError
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.chat import build_chat_encoder
from megatron.tokenizer.chat.encoder import ChatEncoder
from megatron.tokenizer.chat.template import ChatError
from tests.helpers.chats import CHATML, FORGETS, MARKED, SPECIAL, chat, encoded, some_chats, write_chat_tokenizer

transformers = pytest.importorskip("transformers")
CHATS = some_chats(12)
THINKS = CHATML.replace("assistant\n' }}", "assistant\n<think>' }}")  # what it prompts with it leaves out later


def encoder(folder: Path, template: str | None = CHATML, form: str | None = None, **settings: Any) -> ChatEncoder:
    write_chat_tokenizer(folder, template)
    config = TokenizerConfig(
        **{"tokenizer_type": "HuggingFaceTokenizer", **settings},
        tokenizer_model=str(folder),
        sft_tokenizer_prompt_format=form,
    )
    return build_chat_encoder(config, build_tokenizer(config).eod_id)


def answered(made: ChatEncoder, messages: list[Any]) -> tuple[list[int], list[int]]:
    """The ids, and 1 for each that is to be predicted."""
    ((ids, counted),) = encoded(made, messages)
    assert not counted[-1], "nothing is predicted from the last token of a conversation"
    return ids.tolist(), [0, *counted[:-1].astype(int).tolist()]


def test_ids_and_answers_are_those_of_transformers(tmp_path: Path) -> None:
    made = encoder(tmp_path, MARKED)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert made.template.marked
    for messages in CHATS:
        expected = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
        assert answered(made, messages) == (expected["input_ids"], expected["assistant_masks"])
        assert any(expected["assistant_masks"])


def test_tools_and_keys_of_messages_reach_the_template(tmp_path: Path) -> None:
    template = (
        "{{ tools | tojson }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content if m.content is defined else m.tool_calls | tojson }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{{ bos_token }}{% endfor %}"
    )
    made, tools = encoder(tmp_path, template), [{"type": "function", "function": {"name": "é <f>"}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "é <f>", "arguments": {"x": 1}}]}
    messages: list[Any] = [*chat("a", "b", "c"), call, {"role": "tool", "content": "3"}]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(messages, tools=tools, return_assistant_tokens_mask=True, return_dict=True)
    ((ids, counted),) = encoded(made, messages, tools)
    assert (ids.tolist(), [0, *counted[:-1]]) == (expected["input_ids"], expected["assistant_masks"])


def test_without_marks_an_answer_is_what_comes_after_its_prompt(tmp_path: Path) -> None:
    """ChatML counts the same with and without marks: answer and end-of-turn token, but not the line break."""
    marked = encoder(tmp_path / "marked", MARKED)
    made = encoder(tmp_path / "chatml")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "chatml")
    assert not made.template.marked
    for messages in CHATS:
        ids, counted = answered(made, messages)
        assert ids == theirs.apply_chat_template(messages)["input_ids"]
        assert (ids, counted) == answered(marked, messages)
        spoken = theirs.decode([i for i, c in zip(ids, counted) if c])
        assert spoken == "".join(m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant")


@pytest.mark.parametrize("template", [CHATML, MARKED, FORGETS])
def test_a_prompt_is_that_of_transformers(template: str, tmp_path: Path) -> None:
    made = encoder(tmp_path, template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for messages in CHATS[:4]:
        text, ids = made.prompt(messages[:-1])
        assert text == theirs.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
        assert ids == theirs.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
    with pytest.raises(ChatError, match="message 1 holds the text"):
        made.prompt(chat("a<|im_end|>"))


@pytest.mark.parametrize("form", ["identity", "nemotron-h-aligned", "nemotron-nano-v2"])
def test_a_prompt_in_the_formats_of_megatron_is_what_its_answer_follows(form: str, tmp_path: Path) -> None:
    """The prompt does not end with an end of document."""
    made, messages = encoder(tmp_path, form=form), chat("who?", "I", "and", "you", system="s")
    ids, counted = answered(made, messages)
    assert made.prompt(messages[:-1])[1] == ids[: max(i for i in range(len(ids)) if not counted[i]) + 1]


@pytest.mark.parametrize("beside", ["eos_token", "added_tokens_decoder"])
def test_a_token_that_only_the_files_beside_name_is_one(beside: str, tmp_path: Path) -> None:
    """transformers adds such a token when it opens the folder."""
    write_chat_tokenizer(tmp_path, "{% for m in messages %}{{ bos_token + m.content + eos_token }}{% endfor %}")
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    token = described["added_tokens"].pop(0)
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    if beside == "added_tokens_decoder":
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config["added_tokens_decoder"] = {"0": {name: value for name, value in token.items() if name != "id"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    made, theirs = ChatEncoder(tmp_path, "default", 0), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for messages in CHATS[:3]:
        expected = theirs.apply_chat_template(messages)["input_ids"]
        assert expected[0] == 0 and made.prompt(messages)[1] == expected
    with pytest.raises(ChatError, match=r"message 1 holds the text '<\|endoftext\|>', which is a special token"):
        made.prompt(chat("a<|endoftext|>"))


def rewritten(folder: Path, **changes: Any) -> ChatEncoder:
    """The tokenizer with changes in tokenizer.json; `tokens` change each added token."""
    described = json.loads((folder / "tokenizer.json").read_text())
    described["added_tokens"] = [{**token, **changes.get("tokens", {})} for token in described["added_tokens"]]
    changes.pop("tokens", None)
    (folder / "tokenizer.json").write_text(json.dumps({**described, **changes}))
    return ChatEncoder(folder, "default", 0)


NAMED, END = "<|im_end|>", "'<.im_end.>'"
TOOLS: list[Any] = [
    {"name": NAMED},
    {"type": "function", "function": {"name": "f", "description": f"a{NAMED}b"}},
    {"function": {"name": "f", "parameters": {"properties": {NAMED: {"type": "string"}}}}},
    {"function": {"name": "f", "parameters": {"enum": ["x", [NAMED]]}}},
    NAMED,
]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_special_token_in_a_tool(tool: Any, tmp_path: Path) -> None:
    """Templates write tools as JSON, whose text could also end a turn."""
    made, plain = encoder(tmp_path, "{{ tools | tojson }}" + CHATML), {"name": "<f>"}
    for call in (partial(encoded, made), made.prompt):
        with pytest.raises(ChatError, match=f"^tool 2 holds the text {END}, which is a special token that could end"):
            call(chat("a", "b"), [plain, tool])
    encoded(made, chat("a", "b"), [plain])
    encoded(encoder(tmp_path, form="identity"), chat("a", "b"), [tool])  # it spells its tokens


NORMALIZERS = {
    "Lowercase": ({"type": "Lowercase"}, "a<|IM_END|>"),
    "NFKC": ({"type": "NFKC"}, "a\uff1c\uff5cim\uff3fend\uff5c\uff1e"),
    "accents": ({"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}]}, "<|im_\u00e9nd|>"),
    "Replace": ({"type": "Replace", "pattern": {"String": "!"}, "content": "|"}, "<!im_end!>"),
    "Prepend": (
        {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "_"}, {"type": "Lowercase"}]},
        "a _<|IM_END|>",
    ),
}


@pytest.mark.parametrize("name", NORMALIZERS)
def test_a_special_token_that_the_normalizer_makes(name: str, tmp_path: Path) -> None:
    """The tokenizer looks for `normalized` tokens in normalized text."""
    normalizer, text = NORMALIZERS[name]
    write_chat_tokenizer(tmp_path, "{{ messages[0].content }}")
    made = rewritten(tmp_path, normalizer=normalizer, tokens={"normalized": True})
    assert SPECIAL.index(NAMED) in made._rust.encode(text).ids
    with pytest.raises(ChatError, match=r"^message 1 holds the text .* \(as the tokenizer normalizes it\), which is"):
        made.prompt(chat(text))
    with pytest.raises(ChatError, match=r"^tool 1 holds the text .* \(as the tokenizer normalizes it\), which is"):
        made.prompt(chat("a"), [{"name": text}])
    made = rewritten(tmp_path, tokens={"normalized": False})
    assert SPECIAL.index(NAMED) not in made.prompt(chat(text))[1]


def test_half_a_character_under_a_normalizer_is_one_line(tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path)
    made = rewritten(tmp_path, normalizer={"type": "Lowercase"}, tokens={"normalized": True})
    with pytest.raises(ChatError, match="the tokenizer fails on message 1 "):
        encoded(made, chat("a\ud800", "b"))


def test_an_eos_listed_as_an_ordinary_token_is_special(tmp_path: Path) -> None:
    """The token's text would still become the end of document."""
    write_chat_tokenizer(tmp_path)
    with pytest.raises(ChatError, match=r"message 1 holds the text '<\|endoftext\|>', which is a special token"):
        rewritten(tmp_path, tokens={"special": False}).prompt(chat("a<|endoftext|>"))


def test_a_character_of_several_tokens_at_the_end_of_an_answer_counts_whole(tmp_path: Path) -> None:
    """`transformers` counts only the first of them."""
    made = encoder(tmp_path, "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}.{% endfor %}")
    assert answered(made, chat("a🙂"))[1] == [0, 1, 1, 1, 1, 0]


def test_the_formats_of_megatron(tmp_path: Path) -> None:
    """Counts answers and the end of document that Megatron-LM adds; its `default` counts every token."""
    theirs = build_tokenizer(TokenizerConfig(tokenizer_type="SFTTokenizer", tokenizer_model=folder_of(tmp_path)))
    messages = chat(" who? /think", " I ", "and", "you", system="s")
    nano = "<SPECIAL_10>System\ns\n<SPECIAL_11>User\nwho?\n<SPECIAL_11>Assistant\n[I\n<SPECIAL_12>\n]<SPECIAL_11>User\n"
    expected = {
        "identity": "s who? /think[ I ]and[you<|endoftext|>]",
        "nemotron-h-aligned": "<SPECIAL_10>System\ns\n<SPECIAL_11>User\nwho? /think\n<SPECIAL_11>Assistant\n[I\n]"
        "<SPECIAL_11>User\nand\n<SPECIAL_11>Assistant\n[you\n<|endoftext|>]",
        "nemotron-nano-v2": f"{nano}and\n<SPECIAL_11>Assistant\n[you\n<SPECIAL_12>\n<|endoftext|>]",
    }
    for form, text in expected.items():
        ids, counted = answered(encoder(tmp_path, form=form), messages)
        shown = "".join(
            "[" * (c and not p) + "]" * (p and not c) + theirs.detokenize([i])
            for i, c, p in zip(ids, counted, [0, *counted])
        )
        assert shown + "]" * counted[-1] == text
    ids, counted = answered(encoder(tmp_path, form="identity"), chat("<SPECIAL_10>", "<|im_end|>"))
    assert ([SPECIAL[i] for i in ids], counted) == (["<SPECIAL_10>", "<|im_end|>", "<|endoftext|>"], [0, 1, 1])
    assert encoder(tmp_path, tokenizer_type="SFTTokenizer").format == "nemotron-h-aligned"
    assert encoder(tmp_path).format == "default"


def folder_of(path: Path) -> str:
    write_chat_tokenizer(path)
    return str(path)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (THINKS, chat("a", "b"), "does not begin message 2 with its own add_generation_prompt .* put {% generation %}"),
        (
            "{{ raise_exception('roles must alternate') }}",
            chat("a", "b"),
            "rejects the conversation .roles must alternate",
        ),
        ("{{ messages.pop() }}", chat("a", "b"), "rejects the conversation"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", chat("a", "b"), "rejects the conversation"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", chat("a", "b"), "rejects the conversation"),
        ("{{ strftime_now('%d') }}", chat("a", "b"), "rejects the conversation .'strftime_now' is undefined"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", chat("a", "b"), "recurses or nests too deeply"),
        (CHATML, chat("a<|im_end|>", "b"), r"message 1 holds the text '<\|im_end\|>', which is a special token"),
        (CHATML, chat("a", "\ufdd0"), "U.FDD0"),
    ],
)
def test_what_cannot_be_encoded(template: str, messages: list[Any], message: str, tmp_path: Path) -> None:
    made = encoder(tmp_path, template)
    with pytest.raises(ChatError, match=message):
        encoded(made, messages)


def test_a_single_answer_of_a_template_that_forgets_is_known(tmp_path: Path) -> None:
    _, counted = answered(encoder(tmp_path, FORGETS), chat("a", "b"))
    assert sum(counted) == len("<think></think>b") + 1


def test_an_answer_that_is_forgotten_later_is_trained_as_it_was_given(tmp_path: Path) -> None:
    """Each answer is trained after the text that the model had read when it gave it; equal prefixes are one text."""
    made = encoder(tmp_path, FORGETS)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    said = chat("a", "b", "c", "d", "e")
    for messages, lasts in ((said[:4], (2, 4)), (said, (2, 4))):
        found = encoded(made, messages)
        assert len(found) == len(lasts)
        for (ids, counted), last in zip(found, lasts, strict=True):
            assert ids.tolist() == theirs.apply_chat_template(messages[:last])["input_ids"]
            prompt = theirs.apply_chat_template(messages[: last - 1], add_generation_prompt=True)["input_ids"]
            expected = [len(prompt) <= place + 1 < len(ids) - 1 for place in range(len(ids))]  # not the line break
            assert counted.tolist() == expected
    calls = [*chat("a", "b"), {"role": "tool", "content": "3"}, {"role": "assistant", "content": "c"}]
    kept = FORGETS.replace("loop.last", "loop.index0 > ns.user").replace(
        "{% for", "{% set ns = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.user = loop.index0 %}{% endif %}{% endfor %}{% for", 1,
    )  # fmt: skip
    ((_, counted),) = encoded(encoder(tmp_path, kept), calls)
    assert sum(counted) == 2 * (len("<think></think>b") + 1), "both answers to one question in one text"
    assert [sum(counted) for _, counted in encoded(encoder(tmp_path, kept), [*calls, *chat("d", "e")])] == [34, 17]


def test_the_template_is_found_or_asked_for(tmp_path: Path) -> None:
    made = encoder(tmp_path, None, form="identity")
    with pytest.raises(ConfigError, match="has no chat template"):
        encoder(tmp_path, None)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    for form in (CHATML, named):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": form}))
        assert ChatEncoder(tmp_path, "default", 0).template.source == CHATML
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": ["a"], "template": CHATML}]})
    )
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatEncoder(tmp_path, "default", 0)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: not a chat template"):
        ChatEncoder(tmp_path, "default", 0).check()
    assert made.fingerprint != ChatEncoder(tmp_path, "nemotron-h-aligned", 0).fingerprint
    with pytest.raises(ConfigError, match=r"names none; add eos_token"):
        ChatEncoder(tmp_path, "identity", None)
    with pytest.raises(ConfigError, match="--sft: NullTokenizer has no chat template"):
        build_chat_encoder(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9), 9)
    text = (tmp_path / "tokenizer.json").read_text().replace(SPECIAL[4], "other")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match="has no token <SPECIAL_11>; use --sft-tokenizer-prompt-format default"):
        ChatEncoder(tmp_path, "nemotron-h-aligned", 0)

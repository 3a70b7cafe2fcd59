"""Formats of --sft-tokenizer-prompt-format as chat templates, with the assistant's answers marked.

All but `default` come from Megatron-LM, which ends each conversation with the end-of-document token and counts it
in the loss.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptFormat:
    template: str | None  # None: the tokenizer's own
    tokens: tuple[str, ...] = ()  # required in the vocabulary
    ends_with_eod: bool = True
    spells_tokens: bool = False  # the messages already contain their special tokens
    before_answer: str = ""  # written before an answer, so missing at the end of a prompt


_ANSWER = "{% generation %}TEXT{% endgeneration %}"


def _by_role(**texts: str) -> str:
    first, *others = texts.items()
    branches = [f"{{% if message.role == '{first[0]}' %}}{first[1]}"]
    branches += [f"{{% elif message.role == '{role}' %}}{text}" for role, text in others]
    return "{% for message in messages %}" + "".join(branches) + "{% endif %}{% endfor %}"


def _answer(text: str) -> str:
    return _ANSWER.replace("TEXT", text)


_WITHOUT_SWITCHES = "message.content.replace('/think', '').replace('/no_think', '').strip()"

FORMATS = {
    "default": PromptFormat(None, ends_with_eod=False),
    "identity": PromptFormat(
        "{% for message in messages %}{% if message.role == 'assistant' %}"
        + _answer("{{ message.content }}")
        + "{% else %}{{ message.content }}{% endif %}{% endfor %}",
        spells_tokens=True,
    ),
    "nemotron-h-aligned": PromptFormat(
        _by_role(
            system="{{ '<SPECIAL_10>System\n' + message.content.strip() + '\n' }}",
            user="{{ '<SPECIAL_11>User\n' + message.content.strip() + '\n<SPECIAL_11>Assistant\n' }}",
            assistant=_answer("{{ message.content.strip() + '\n' }}"),
        ),
        ("<SPECIAL_10>", "<SPECIAL_11>"),
    ),
    "nemotron-nano-v2": PromptFormat(
        _by_role(
            system="{{ '<SPECIAL_10>System\n' + " + _WITHOUT_SWITCHES + " + '\n' }}",
            user="{{ '<SPECIAL_11>User\n' + " + _WITHOUT_SWITCHES + " + '\n' }}",
            assistant="{{ '<SPECIAL_11>Assistant\n' }}" + _answer("{{ message.content.strip() + '\n<SPECIAL_12>\n' }}"),
        ),
        ("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
        before_answer="<SPECIAL_11>Assistant\n",
    ),
}

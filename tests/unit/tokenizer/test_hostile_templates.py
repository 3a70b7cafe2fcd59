"""Templates that loop, fill the memory or write without end give one line each; a bare process renders them.

The first table runs with small limits; `test_the_limits_of_a_run` has those of a run.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.data.cache import CachePlace, IndexCache
from megatron.data.sft.conversations import Conversations
from megatron.errors import ConfigError, DataError
from megatron.tokenizer.chat import renderer
from megatron.tokenizer.chat import template as chat_template
from megatron.tokenizer.chat.encoder import ChatEncoder
from megatron.tokenizer.chat.template import ChatError, ChatTemplate, LimitError, Limits, Rendered, request
from megatron.utils.process import signals_held
from tests.helpers.chats import CHATML, chat, encoded, write_chat_tokenizer, write_chats

MIB = 1 << 20
SMALL = Limits(memory_bytes=256 * MIB, cpu_seconds=0, output_bytes=MIB)  # 0: the rest of a second
SAID = chat("hello", "you")
CPU, MEMORY, OUTPUT, REFUSED = (
    "of CPU time",
    "more than 256 MiB of memory",
    "writes more than 1 MiB",
    "rejects the conversation",
)
ENDLESS = "recurses or nests too deeply"
PRINTS = "rejects the conversation .the template prints an object's address, which differs each time; add . list or"

GROWS = "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "nested loops": (LOOPS, CPU),
    "repeated text": ("{% set n = 10 ** 10 %}{{ 'a' * n }}", MEMORY),
    "a repeated list": ("{% set x = [messages | length] * 10 ** 9 %}", MEMORY),
    "a doubling namespace": (GROWS, MEMORY),
    "a doubling list": (GROWS.replace("'ab'", "[1]").replace("n.x ~ n.x", "n.x + n.x"), MEMORY),
    "a width": ("{{ '%*d' % (10 ** 9, messages | length) }}", MEMORY),
    "a width of format": ("{{ '{:>{}}'.format('x', 10 ** 9) }}", MEMORY),
    "a filter's width": ("{{ messages[0].content | center(10 ** 9) }}", MEMORY),
    "an indent": ("{{ messages | tojson(indent=10 ** 9) }}", MEMORY),
    "a join": ("{{ range(99999) | join('x' * 10 ** 5) }}", MEMORY),
    "a replacement": ("{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 6) }}", MEMORY),
    "a long output": ("{% for i in range(99999) %}{{ 'twelve bytes' }}{% endfor %}", OUTPUT),
    "an output of wide characters": ("{% for i in range(9999) %}{{ '🙂' * 99 }}{% endfor %}", OUTPUT),
    "an output that JSON writes longer": ("{{ '\\x01' * 10 ** 6 }}", OUTPUT),
    "a wide range": ("{% for i in range(10 ** 9) %}{% endfor %}", REFUSED),
    "macros": ("{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}", ENDLESS),
    "two macros": ("{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}", ENDLESS),
    "a recursive loop": ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", ENDLESS),
    "attributes": ("{{ ''.__class__.__base__.__subclasses__() }}", REFUSED),
    "attributes of format": ("{{ '{0.__class__.__mro__}'.format(messages) }}", REFUSED),
    "attributes of a filter": ("{{ messages | map(attribute='__class__') | list }}{{ x.y }}", REFUSED),
    "globals": ("{{ raise_exception.__globals__.sys.modules }}", REFUSED),
    "a module": ("{% import 'os' as os %}", REFUSED),
    "a file": ("{% include '/etc/passwd' %}", REFUSED),
    "a division": ("{{ 1 / 0 }}", REFUSED),
    "a number of many digits": ("{{ (messages | length) ** 20000 }}", REFUSED),
    "a random choice": (
        "{{ messages | random }}",
        "rejects the conversation .random and lipsum give a different text each time",
    ),
    "random choices": ("{{ [messages] | map('random') | list }}", "rejects the conversation .random and lipsum"),
    "random words": (
        "{{ lipsum(n=1) }}",
        "rejects the conversation .random and lipsum give a different text each time",
    ),
    "an object": ("{{ joiner() }}", PRINTS),
    "an object in a list": ("{{ [cycler(1)] }}", PRINTS),
    "a call without parentheses": ("{{ 'a' ~ messages[0].content.strip }}", PRINTS),
    "a list that is none": ("{{ messages | map(attribute='role') }}", PRINTS),
    "a function": ("{{ '%s' % raise_exception }}", PRINTS),
    "a terminal's commands": ("{{ raise_exception('\\x1b[2J\\na') }}", r"rejects the conversation \(.\[2J a\)"),
}
AT_START = {
    "a power that the compiler computes": ("{{ 3 ** (10 ** 9) }}", CPU),
    "parentheses": ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", ENDLESS),
    "blocks": ("{% if 1 %}" * 200 + "{% endif %}" * 200, "not a chat template"),
    "no template": ("{% if %}", "not a chat template"),
}


def made(source: str, limits: Limits = SMALL) -> ChatTemplate:
    names = {"bos_token": "<s>"}
    return ChatTemplate(source, named="the chat template in F", special_tokens=names, ends=(), limits=limits)


def rendered(template: ChatTemplate, messages: Any = SAID) -> tuple[Rendered, ...]:
    (found,) = template.render([request(messages)])
    if isinstance(found, ChatError):
        raise found
    return found


def checked(error: BaseException) -> None:
    text = str(error)
    assert "\n" not in text and "\x1b" not in text and len(text) < 400
    assert "the chat template in F" in text


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_one_line(name: str) -> None:
    source, reason = HOSTILE[name]
    template = made(source)
    with pytest.raises(ChatError, match=reason) as error:
        rendered(template)
    checked(error.value)


@pytest.mark.parametrize("name", AT_START)
def test_a_hostile_template_is_found_at_the_start(name: str) -> None:
    source, reason = AT_START[name]
    with pytest.raises(ConfigError, match=reason) as error:
        made(source).check()
    checked(error.value)


def test_an_address_in_the_text_of_a_message_is_text() -> None:
    """People paste addresses that Python prints."""
    printed = "<function f at 0x7f0a1b2c>"
    (found,) = rendered(made("{{ messages[0].content }} <x at 0x1>"), [{"role": "user", "content": printed}])
    assert found.text == f"{printed} <x at 0x1>"


def test_the_limits_of_a_run() -> None:
    """Limits of the page. They count CPU time, so that other work on the machine does not fail a template."""
    assert Limits() == Limits(memory_bytes=1 << 30, cpu_seconds=5, output_bytes=64 * MIB)
    writes = "{% for i in range(messages | length) %}{{ 'a' * 1048576 }}{% endfor %}"
    template = made(writes, Limits())
    assert len(rendered(template, SAID * 8)[0].text) == 16 * MIB
    with pytest.raises(LimitError, match="writes more than 64 MiB for one conversation, the limit for templates"):
        rendered(template, SAID * 33)
    with pytest.raises(LimitError, match="takes more than 1 GiB of memory"):
        rendered(made("{{ 'a' * (messages | length * 2 ** 29) }}", Limits()))


def test_cpu_time_counts_anew_for_each_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system counts a process's whole life, but the limit applies per conversation."""
    given: list[Any] = []
    monkeypatch.setattr(renderer.resource, "getrlimit", lambda kind: (7, renderer.resource.RLIM_INFINITY))
    monkeypatch.setattr(renderer.resource, "setrlimit", lambda kind, limits: given.append((kind, limits)))
    monkeypatch.setattr(renderer.time, "process_time", lambda: 12.2)
    answer = json.loads(renderer.attempt(5, 99, lambda: len(given)))
    assert answer == 1, "set before the work"
    assert given == [(resource.RLIMIT_CPU, (18, resource.RLIM_INFINITY))], "the hard one stays: it cannot be raised"


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads /proc")
def test_the_process_holds_nothing_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "1")
    secret = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.set_inheritable(secret, True)
    template = made(CHATML)
    rendered(template)
    place = Path("/proc", str(process_of(template)))
    assert (place / "environ").read_bytes() == b""
    files = {int(path.name): str(path.readlink()) for path in (place / "fd").iterdir()}
    assert sorted(files) == [0, 1, 2] and files[2] == os.devnull
    assert all(files[number].startswith("pipe:") for number in (0, 1))
    assert (place / "cwd").readlink() == Path("/")
    limits = (place / "limits").read_text().splitlines()
    (memory,) = [line.split()[3:5] for line in limits if line.startswith("Max address space")]
    assert memory == [str(256 * MIB), str(256 * MIB)], "the hard one too: nothing raises it again"
    assert not [line for line in (place / "maps").read_text().splitlines() if "torch" in line or "numpy" in line]
    os.close(secret)


def process_of(template: ChatTemplate) -> int:
    assert template._process is not None
    return template._process._popen.pid


def test_a_process_renders_until_it_is_closed_or_killed() -> None:
    template = made("{{ messages[0].content }}", Limits())
    assert [each.text for each in rendered(template)] == ["hello"]
    first = process_of(template)
    said = [chat(f"{i} \ud800 é 🙂 " + "x" * (i % 9) * 9999) for i in range(200)]  # several messages to the process
    found = [each[0].text for each in template.render(map(request, said)) if isinstance(each, tuple)]
    assert found == [messages[0]["content"] for messages in said] and process_of(template) == first
    for each in template.render(map(request, said)):
        assert isinstance(each, tuple) and each[0].text == said[0][0]["content"]
        break  # the unread answers must not answer the next request
    assert [each.text for each in rendered(template)] == ["hello"]
    second = process_of(template)
    os.kill(second, signal.SIGKILL)
    os.waitid(os.P_PID, second, os.WEXITED | os.WNOWAIT)
    assert [each.text for each in rendered(template)] == ["hello"] and process_of(template) not in (first, second)
    third = template._process
    assert third is not None
    del template
    assert third._popen.poll() is None
    third.end()
    assert third._popen.poll() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("", "its rendering process ended .exit code 0."),
        ("import sys; sys.exit(3)", "ended .exit code 3."),
        ("import os; os.kill(os.getpid(), 9)", "was killed .out of memory"),
        ("import os; os.kill(os.getpid(), 11)", "ended .signal 11."),
        ("print('x' * 99)", "makes its process return something other than text"),
        ("answer(b'not JSON')", "return something other than text"),
        ("answer(b'[[\"ab\", [[0, 3]]]]')", "return something other than text"),
        ("answer(b'[[1, []]]')", "return something other than text"),
        ("answer(b'{}')", "return something other than text"),
        ("answer(b'[' * 99999 + b']' * 99999)", "return something other than text"),
    ],
)
def test_a_process_that_answers_anything_else(program: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that leaves its sandbox can still send only untrusted data."""
    template = made(CHATML)
    template.check()
    process = template._process
    assert process is not None
    answer = "import os; answer = lambda content: os.write(1, len(content).to_bytes(8, 'big') + content); "
    real = process._popen
    process._popen = chat_template.subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", answer + program], stdin=-1, stdout=-1
    )
    real.kill()
    with pytest.raises(LimitError, match=message) as error:
        rendered(template)
    checked(error.value)


def test_a_process_that_begins_with_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "__file__", str(tmp_path / "renderer.py"))
    for program in ("print('x' * 99)", "import os; os.write(1, bytes(7) + b'\\x02[]')"):
        (tmp_path / "renderer.py").write_text(program, encoding="utf-8")
        with pytest.raises(ConfigError, match="makes its process return something other than text") as error:
            made(CHATML).check()
        checked(error.value)


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="reads /proc")
def test_a_stopped_process_is_named_until_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request exceeds a pipe's buffer, so it waits for the process, too."""
    monkeypatch.setattr(chat_template, "_STOPPED_AFTER", 0.1)
    lines: list[str] = []

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            os.kill(number, signal.SIGCONT)

    template = made("{{ messages[0].content }}", Limits())
    template.check()
    number, log, reader = process_of(template), logging.getLogger(chat_template.__name__), Reader()
    log.addHandler(reader)
    try:
        os.kill(number, signal.SIGSTOP)
        assert rendered(template, chat("x" * MIB))[0].text == "x" * MIB
    finally:
        log.removeHandler(reader)
    (line,) = lines
    assert line.startswith("the chat template in F: its worker") and line.endswith(f"kill -CONT {number} continues it")


def test_two_renderings_at_once_do_not_mix() -> None:
    template = made("{{ messages[0].content }}", Limits())
    outer = template.render([request(chat(said)) for said in ("a", "b")])
    texts = [next(outer), *template.render([request(chat("c"))]), *outer]
    assert [each[0].text for each in texts if isinstance(each, tuple)] == ["a", "c", "b"]


def test_the_limit_of_time_holds_where_its_signal_is_blocked() -> None:
    with signals_held(signal.SIGXCPU), pytest.raises(ChatError, match=CPU):
        rendered(made(LOOPS))


def test_a_line_and_the_template_are_named(tmp_path: Path) -> None:
    """Failures of one conversation are counted; a limit ends the file at once, whatever follows."""
    write_chat_tokenizer(
        tmp_path, "{% if messages | length > 2 %}{{ 'a' * 10 ** 10 }}{% else %}" + CHATML + "{% endif %}"
    )
    path = write_chats(tmp_path / "c.jsonl", [SAID, chat("a", "b", "c", "d"), chat("a", "b", "c", "d"), [], SAID])
    encoder = ChatEncoder(tmp_path, "default", 0)
    with pytest.raises(DataError) as error:
        Conversations(str(path), encoder, IndexCache(CachePlace.of(None, str(path), files=(str(path),))))
    named = f"{path}, line 2: the chat template in {tmp_path / 'chat_template.jinja'} takes more than 1 GiB of memory"
    assert str(error.value).startswith(named) and encoder.template._process is None


def test_a_system_without_a_limit_of_memory_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Setting the limit fails on macOS, for example."""
    failing = "def setrlimit(*_):\n    raise ValueError\nresource.setrlimit = setrlimit\n"
    source = Path(renderer.__file__).read_text(encoding="utf-8").replace("if __name__", failing + "if __name__")
    (tmp_path / "renderer.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(renderer, "__file__", str(tmp_path / "renderer.py"))
    assert rendered(made(CHATML))
    assert [record.getMessage() for record in caplog.records] == [
        "the chat template in F: this system cannot limit the memory of the rendering process (RLIMIT_AS); CPU "
        "time and output are limited"
    ]


def test_the_package_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="F: needs the package jinja2: pip install jinja2"):
        made(CHATML).check()
    with pytest.raises(ConfigError, match=r"jinja2 3\.1\.5 has holes .* pip install -U"):
        chat_template._check_version("the chat template in F", "3.1.5")


MANY = "{% generation %}a{% endgeneration %} "
MARKS_MANY = "{% for i in range(300) %}{% for j in range(1000) %}" + MANY + "{% endfor %}{% endfor %}"


def test_many_answers_take_no_more_than_their_text(tmp_path: Path) -> None:
    """Reading the process's output has no time limit, and comparing each mark with all took minutes."""
    write_chat_tokenizer(tmp_path, MARKS_MANY)
    ((ids, counts),) = encoded(ChatEncoder(tmp_path, "default", 0), SAID)
    assert len(ids) == 600_000 and counts.sum() == 299_999


@pytest.mark.parametrize("depth", [600, 900])
def test_deeply_nested_values_are_read(depth: int, tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path, CHATML)
    encoder = ChatEncoder(tmp_path, "default", 0)
    nested = json.loads("[" * depth + '"<|im_end|>"' + "]" * depth)
    with pytest.raises(ChatError, match=r"message 1 holds the text '<.im_end.>'"):
        encoded(encoder, [{"role": "user", "content": "hello", "extra": nested}])


def test_a_name_of_a_field_is_text_too(tmp_path: Path) -> None:
    """Templates write the arguments of tool calls as JSON."""
    write_chat_tokenizer(tmp_path, CHATML)
    calls = [{"function": {"name": "f", "arguments": {"<|im_end|>": 1}}}]
    with pytest.raises(ChatError, match=r"message 2 holds the text '<.im_end.>'"):
        encoded(ChatEncoder(tmp_path, "default", 0), [*SAID[:1], {"role": "assistant", "tool_calls": calls}])

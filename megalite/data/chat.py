"""Conversion of conversations to text, with the answers marked.

A record has `messages`, a list of objects with `role` and `content`, or a `prompt` and its `completion`. The
tokenizer's chat template converts messages to text. Without a template they are written as

    <|user|>
    question
    <|assistant|>
    answer

with the end-of-document token after each answer. A prompt and its completion are joined without changes, with the
end-of-document token at the end.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megalite.data.optional import optional_import
from megalite.data.tokenizers.files import read_fields_beside, read_text_beside
from megalite.errors import DataError
from megalite.process.programs import python, start
from megalite.small_files import parse_json, read_small_file

ANSWERS = "assistant"
RENDERING_SECONDS = 3.0
"""Limit of CPU time, in seconds, for rendering a conversation or compiling the template."""
LONGEST_WAIT = 60.0
"""Limit of wall-clock time, in seconds, for the same."""
LONGEST_ANSWER = 128 << 20
"""Largest answer in bytes: twice the longest text as JSON."""


class Span(NamedTuple):
    """Part of a conversation.

    Attributes:
        text: text of the part.
        learned: true if the part is an answer, which counts in the loss.
        ends: true if the end-of-document token follows; it belongs to the part.
    """

    text: str
    learned: bool
    ends: bool = False


@dataclass(frozen=True)
class ChatTemplate:
    """Jinja chat template of a Hugging Face tokenizer, and the special tokens that the template may use."""

    source: str
    special_tokens: Mapping[str, str]


def find_template(tokenizer_model: str) -> ChatTemplate | None:
    """Return the chat template of a Hugging Face tokenizer: chat_template.jinja, or a field of tokenizer_config.json.

    Raises:
        DataError: a file cannot be read.
    """
    path = Path(tokenizer_model)
    folder = path if path.is_dir() else path.parent
    fields = read_fields_beside(folder / "tokenizer_config.json")
    source = read_text_beside(folder / "chat_template.jinja")
    try:
        source = source or _named_default(fields.get("chat_template"))
    except (TypeError, KeyError) as error:
        raise DataError(
            f'"chat_template" of {folder / "tokenizer_config.json"} is not one: copy the file again'
        ) from error
    return None if source is None else ChatTemplate(source, _special_tokens(fields))


def given_template(argument: str, tokenizer_model: str | None) -> ChatTemplate:
    """Return the template of `--chat-template`, which is the template itself or the path of a file with it."""
    found = find_template(tokenizer_model) if tokenizer_model else None
    special = found.special_tokens if found else {}
    if "{" in argument:
        return ChatTemplate(argument, special)
    try:
        return ChatTemplate(read_small_file(Path(argument)).decode(), special)
    except (OSError, ValueError) as error:
        raise DataError(f"--chat-template {argument} cannot be read: give a file, or the template itself") from error


@contextmanager
def conversation_reader(template: ChatTemplate | None) -> Iterator[Callable[[dict[str, Any]], list[Span]]]:
    """Yield a function from a record to its spans.

    The function raises ValueError with a reason if a record is not a conversation.

    Raises:
        DataError: the template is not valid.
        ConfigurationError: Jinja is not installed, or its version has a sandbox with known vulnerabilities.
    """
    with nullcontext() if template is None else closing(_Renderer(template)) as renderer:

        def spans(record: dict[str, Any]) -> list[Span]:
            if "messages" in record:
                messages = _messages(record["messages"])
                return _plain(messages) if renderer is None else renderer.spans(messages)
            prompt, completion = record.get("prompt"), record.get("completion")
            if not isinstance(prompt, str) or not isinstance(completion, str):
                raise ValueError(
                    'expected "messages", a list of {"role", "content"}, or texts "prompt" and "completion"'
                )
            return [Span(prompt, False), Span(completion, True, ends=True)]

        yield spans


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError('"messages" is not a list of messages')
    for message in value:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            raise ValueError('a message has no "role"')
        if not isinstance(message.get("content"), str):
            raise ValueError(f'the message of {message["role"]!r} has no text as its "content"')
    return value


def _plain(messages: Sequence[Mapping[str, str]]) -> list[Span]:
    spans = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == ANSWERS:
            spans += [Span(f"<|{role}|>\n", False), Span(content, True, ends=True)]
        else:
            spans.append(Span(f"<|{role}|>\n{content}\n", False))
    return spans


class _Renderer:
    """Child process that renders conversations with a template: `megalite.data.chat_renderer`.

    Raises:
        DataError: the template is not valid.
        ConfigurationError: Jinja is not installed, or its version has a sandbox with known vulnerabilities.
    """

    def __init__(self, template: ChatTemplate) -> None:
        optional_import("jinja2", "jinja2>=3.1.6", "the chat template is written in Jinja")
        self._template = template
        try:
            self._start()
        except ValueError as error:
            self.close()
            raise DataError(f"{error}: give another as --chat-template") from error

    def spans(self, messages: list[dict[str, Any]]) -> list[Span]:
        """Return the spans of a conversation. Raises ValueError if the template refuses it or takes too long."""
        if self._process.returncode is not None:
            self._start()
        return [Span(text, learned) for text, learned in self._ask(messages)]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(LONGEST_WAIT)
        # Only the variables that the interpreter needs to start in the same way: others may be secrets.
        environment = {name: value for name, value in os.environ.items() if name.startswith(("PYTHON", "LD_"))}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        program = str(Path(__file__).with_name("chat_renderer.py"))
        command = python("-P", program, str(RENDERING_SECONDS))
        with theirs:
            ends = theirs.fileno()
            self._process = start(command, stdin=ends, stdout=ends, stderr=subprocess.DEVNULL, cwd="/", env=environment)
        self._ask([self._template.source, dict(self._template.special_tokens)])

    def _ask(self, request: Any) -> Any:
        line = b""
        with suppress(TimeoutError, ConnectionError), self._socket.makefile("rb") as answers:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            line = answers.readline(LONGEST_ANSWER)
        if not line.endswith(b"\n"):
            self.close()
            code = self._process.returncode
            slow = f"takes more than {RENDERING_SECONDS:g} s of CPU time"
            raise ValueError(f"the chat template {slow if code == -signal.SIGPROF else f'ends its process ({code})'}")
        answer, *why_not = parse_json(line)
        if why_not:
            raise ValueError(why_not[0])
        return answer


def _named_default(value: Any) -> str | None:
    """Return the template, or the template named "default" if there are several."""
    if isinstance(value, list):
        return {entry["name"]: str(entry["template"]) for entry in value}.get("default")
    return None if value is None else str(value)


def _special_tokens(fields: Mapping[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {name: fields.get(name) for name in names}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}

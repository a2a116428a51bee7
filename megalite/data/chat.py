"""Conversion of conversations to text, with the answers marked.

A record has `messages`, a list of objects with `role` and `content`, or a `prompt` and its `completion`. The
tokenizer's chat template converts messages to text, with the record's `tools`, `documents` and `chat_template_kwargs`.
An answer with the `weight` 0 is not learned. Every other field is refused, except those of `ORIGIN`: it might change
the text or the loss in the program for which the record was made. Without a template, messages are written as

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
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megalite.data.optional import optional_import
from megalite.data.tokenizers.files import read_fields_beside, read_text_beside
from megalite.data.tokenizers.folder import read_folder
from megalite.errors import DataError
from megalite.process.programs import python, start
from megalite.small_files import parse_json, read_small_file, shown

ANSWERS = "assistant"
_ASKS = "user"
OPTIONS = ("tools", "documents", "chat_template_kwargs")
"""Fields of a record for the chat template."""
ORIGIN = (
    *("id", "uuid", "index", "prompt_id", "conversation_id", "source", "dataset", "category", "language", "license"),
    *("url", "timestamp", "created_at", "meta", "metadata"),
)
"""Fields of a record or a message that say where it comes from: they are no part of its text."""
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
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
        role: role of the message that the part is, if its tokens may have a weight in the loss; otherwise "".
        ends: true if the end-of-document token follows; it belongs to the part.
    """

    text: str
    role: str = ""
    ends: bool = False

    @property
    def learned(self) -> bool:
        """True for an answer, which counts in the loss if no weights are given."""
        return self.role == ANSWERS


@dataclass(frozen=True)
class ChatTemplate:
    """Jinja chat template of a Hugging Face tokenizer.

    Attributes:
        source: the template.
        special_tokens: texts of the special tokens that the template may name.
        for_tools: another template, for conversations with tools, if there is one.
    """

    source: str
    special_tokens: Mapping[str, str]
    for_tools: str | None = None


def find_template(tokenizer_model: str) -> ChatTemplate | None:
    """Return the chat template of a Hugging Face tokenizer: chat_template.jinja, or a field of tokenizer_config.json.

    A template named "tool_use" among several, or in additional_chat_templates/, is for conversations with tools.

    Raises:
        DataError: a file cannot be read, or there are several templates without a default one.
    """
    path = Path(tokenizer_model)
    folder = path if path.is_dir() else path.parent
    config = folder / "tokenizer_config.json"
    more = read_text_beside(folder / "additional_chat_templates" / "tool_use.jinja", folder)
    found = {"default": read_text_beside(folder / "chat_template.jinja"), "tool_use": more}
    if found["default"] is None:
        try:
            found |= _named_templates(read_fields_beside(config).get("chat_template"))
        except (TypeError, KeyError) as error:
            raise DataError(f'"chat_template" of {config} is not one: copy the file again') from error
    source, for_tools = found["default"], found["tool_use"]
    if source is None and (names := sorted(name for name, text in found.items() if text is not None)):
        raise DataError(
            f'{folder} has the chat templates {", ".join(map(shown, names))}, none of them named "default": give one '
            "as --chat-template"
        )
    return None if source is None else ChatTemplate(source, read_folder(folder).names, for_tools)


def given_template(argument: str, tokenizer_model: str | None) -> ChatTemplate:
    """Return the template of `--chat-template`, which is the template itself or the path of a file with it."""
    path = Path(tokenizer_model) if tokenizer_model else None
    special = {} if path is None else read_folder(path if path.is_dir() else path.parent).names
    if "{" in argument:
        return ChatTemplate(argument, special)
    try:
        return ChatTemplate(read_small_file(Path(argument)).decode(), special)
    except (OSError, ValueError) as error:
        raise DataError(f"--chat-template {argument} cannot be read: give a file, or the template itself") from error


@contextmanager
def conversation_reader(
    template: ChatTemplate | None, roles: Sequence[str] = (ANSWERS,)
) -> Iterator[Callable[[dict[str, Any]], list[Span]]]:
    """Yield a function from a record to its spans.

    The function raises ValueError with a reason if a record is not a conversation.

    `roles`: those whose messages are spans by themselves. A prompt is of the role user.

    Raises:
        DataError: the template is not valid.
        ConfigurationError: Jinja is not installed, or its version has a sandbox with known vulnerabilities.
    """
    with nullcontext() if template is None else closing(_Renderer(template, roles)) as renderer:

        def spans(record: dict[str, Any]) -> list[Span]:
            """Return the spans of a record; a ValueError names a field that is missing or has no use."""
            fields = {name: value for name, value in record.items() if value is not None and name not in ORIGIN}
            if "messages" in fields:
                messages = _messages(fields.pop("messages"), renderer is not None)
                options = {name: fields.pop(name) for name in OPTIONS if name in fields}
                # Some data sets repeat the text of a message as "prompt".
                if "prompt" in fields and fields["prompt"] in [message.get("content") for message in messages]:
                    del fields["prompt"]
                _refuse_unused(fields, '"messages"')
                if renderer is not None:
                    return renderer.spans(messages, options)
                _refuse_unused(options, "messages without a chat template (--chat-template)")
                return _plain(messages, roles)
            prompt, completion = fields.pop("prompt", None), fields.pop("completion", None)
            if not isinstance(prompt, str) or not isinstance(completion, str):
                raise ValueError(
                    'expected "messages", a list of {"role", "content"}, or texts "prompt" and "completion"'
                )
            _refuse_unused(fields, '"prompt" and "completion"')
            return [Span(prompt, _ASKS if _ASKS in roles else ""), Span(completion, ANSWERS, ends=True)]

        yield spans


def _refuse_unused(fields: Mapping[str, Any], beside: str) -> None:
    if fields:
        raise ValueError(
            f"it has the field {shown(next(iter(fields)))} beside {beside}, which would not be used: remove it, or "
            'move it into "metadata" if it has no part in the text or the loss'
        )


def _messages(value: Any, has_template: bool) -> list[dict[str, Any]]:
    """Return the messages without fields that are null."""
    if not isinstance(value, list) or not value:
        raise ValueError('"messages" is not a list of messages')
    messages = list[dict[str, Any]]()
    for message in value:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            raise ValueError('a message has no "role"')
        fields = {name: value for name, value in message.items() if value is not None and name not in ORIGIN}
        others = fields.keys() - {"role", "content", "weight"}
        if not isinstance(fields.get("content", "" if has_template and others else None), str):
            raise ValueError(f'the message of {message["role"]!r} has no text as its "content"')
        if not has_template:
            _refuse_unused({name: fields[name] for name in sorted(others)}, "a message without a chat template")
        if "weight" in fields and fields["weight"] not in ((0, 1) if message["role"] == ANSWERS else (0,)):
            raise ValueError(
                f'the message of {message["role"]!r} has the "weight" {shown(fields["weight"])}: an answer counts '
                "in the loss (1) or not (0), and no other message counts"
            )
        messages.append(fields)
    return messages


def _weighted(message: Mapping[str, Any], roles: Collection[str]) -> str:
    """Return the role of a message if its tokens may count in the loss, otherwise ""."""
    role: str = message["role"]
    return role if role in roles and message.get("weight", 1) != 0 else ""


def _plain(messages: Sequence[Mapping[str, Any]], roles: Collection[str]) -> list[Span]:
    spans = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == ANSWERS:
            spans += [Span(f"<|{role}|>\n"), Span(content, _weighted(message, roles), ends=True)]
        else:
            spans.append(Span(f"<|{role}|>\n{content}\n", _weighted(message, roles)))
    return spans


class _Renderer:
    """Child process that renders conversations with a template: `megalite.data.chat_renderer`.

    Raises:
        DataError: the template is not valid.
        ConfigurationError: Jinja is not installed, or its version has a sandbox with known vulnerabilities.
    """

    def __init__(self, template: ChatTemplate, roles: Sequence[str]) -> None:
        optional_import("jinja2", "jinja2>=3.1.6", "the chat template is written in Jinja")
        self._template, self._roles = template, roles
        try:
            self._start()
        except ValueError as error:
            self.close()
            raise DataError(f"{error}: give another as --chat-template") from error

    def spans(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> list[Span]:
        """Return the spans of a conversation.

        Raises:
            ValueError: the template refuses it, takes too long, or never mentions a field of it.
        """
        if self._process.returncode is not None:
            self._start()
        variables = self._variables(messages, options)
        spans = self._ask([messages, variables, self._roles])
        return [
            Span(text, "" if number is None else _weighted(messages[number], self._roles)) for text, number in spans
        ]

    def _variables(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables of the template. Raises ValueError for one that it cannot use."""
        for name in ("tools", "documents"):
            given = options.get(name, [])
            if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
                raise ValueError(f'"{name}" is {shown(given)}, not a list of objects')
        more = options.get("chat_template_kwargs", {})
        if not isinstance(more, dict) or not more.keys().isdisjoint(_RESERVED):
            raise ValueError(f'"chat_template_kwargs" is {shown(more)}, not an object without {", ".join(_RESERVED)}')
        variables = {name: options[name] for name in ("tools", "documents") if name in options} | more
        template = self._template
        source = template.source if "tools" not in variables else template.for_tools or template.source
        fields = {name for message in messages for name in message} - {"role", "content", "weight"}
        for name in (*variables, *sorted(fields)):
            if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", source):
                raise ValueError(
                    f"it has {shown(name)}, which the chat template never mentions, so it would not be used: remove "
                    "it, or give another --chat-template"
                )
        return variables

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _start(self) -> None:
        """Start the process that renders, in an environment without secrets, and send it the template."""
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
        self._ask([self._template.source, dict(self._template.special_tokens), self._template.for_tools])

    def _ask(self, request: Any) -> Any:
        """Return the answer to a request. A ValueError says why there is none: refused, ended, or out of time."""
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


def _named_templates(value: Any) -> dict[str, str]:
    """Return the templates by their names; a single one is named "default"."""
    if isinstance(value, list):
        value = {entry["name"]: entry["template"] for entry in value}
    templates = value if isinstance(value, dict) else {} if value is None else {"default": value}
    return {str(name): str(template) for name, template in templates.items()}

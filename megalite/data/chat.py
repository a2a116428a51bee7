"""Records of conversations to text, and which of it is the answers.

A record has `messages`, a list of `role` and `content`, or a `prompt` and its `completion`. Messages become text
through the tokenizer's chat template. Without one they are written as

    <|user|>
    question
    <|assistant|>
    answer

with the end-of-document token after each answer. A prompt and its completion are joined as they are, with that token at
the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megalite.data.optional import optional_import
from megalite.errors import DataError

ANSWERS = "assistant"


class Span(NamedTuple):
    """A piece of a conversation.

    Attributes:
        text: what it says.
        learned: whether it is an answer.
        ends: whether the end-of-document token follows, as part of it.
    """

    text: str
    learned: bool
    ends: bool = False


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template, and the special tokens it may name, as Hugging Face's tokenizers have them."""

    source: str
    special_tokens: Mapping[str, str]


def find_template(tokenizer_model: str) -> ChatTemplate | None:
    """The chat template among a Hugging Face tokenizer's files: chat_template.jinja, or in tokenizer_config.json.

    Raises:
        DataError: a file cannot be read.
    """
    path = Path(tokenizer_model)
    folder = path if path.is_dir() else path.parent
    try:
        config = _read(folder / "tokenizer_config.json")
        fields = json.loads(config) if config else {}
        source = _read(folder / "chat_template.jinja") or _named_default(fields.get("chat_template"))
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise DataError(f"the tokenizer's files in {folder} cannot be read ({error}): copy them again") from error
    return None if source is None else ChatTemplate(source, _special_tokens(fields))


def given_template(argument: str, tokenizer_model: str | None) -> ChatTemplate:
    """The template of `--chat-template`: the text itself, or a file that holds it."""
    found = find_template(tokenizer_model) if tokenizer_model else None
    special = found.special_tokens if found else {}
    if "{" in argument:
        return ChatTemplate(argument, special)
    try:
        return ChatTemplate(Path(argument).read_text(encoding="utf-8"), special)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--chat-template {argument} cannot be read: give a file, or the template itself") from error


def conversation_reader(template: ChatTemplate | None) -> Callable[[dict[str, Any]], list[Span]]:
    """The function from a record to its spans; it raises ValueError, saying why, for what is no conversation."""
    render = None if template is None else _renderer(template)

    def spans(record: dict[str, Any]) -> list[Span]:
        if "messages" in record:
            messages = _messages(record["messages"])
            return _plain(messages) if render is None else _rendered(messages, render)
        prompt, completion = record.get("prompt"), record.get("completion")
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise ValueError('expected "messages", a list of {"role", "content"}, or texts "prompt" and "completion"')
        return [Span(prompt, False), Span(completion, True, ends=True)]

    return spans


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


def _rendered(messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]], bool], str]) -> list[Span]:
    """The text between what a model is shown before an answer and the conversation up to the answer's end."""
    whole, spans, at = render(messages, False), list[Span](), 0
    for number, message in enumerate(messages):
        if message["role"] == ANSWERS:
            before, after = render(messages[:number], True), render(messages[: number + 1], False)
            if not (whole.startswith(after) and after.startswith(before) and len(before) >= at):
                raise ValueError(
                    "the chat template does not render the beginning of this conversation as it renders the whole, so "
                    "that the answers cannot be told apart: give one that does as --chat-template"
                )
            answer, content = whole[len(before) : len(after)], message["content"].strip()
            header = answer[: max(answer.find(content), 0)].strip()
            # Where a template has no header, as Llama 2's, it may leave add_generation_prompt out.
            if header and before == render(messages[:number], False):
                raise ValueError(
                    f"the chat template does not write {header!r} before an answer where add_generation_prompt asks "
                    "for it, so that the loss would count on it: give one that does as --chat-template"
                )
            spans += [Span(whole[at : len(before)], False), Span(answer, True)]
            at = len(after)
    return [*spans, Span(whole[at:], False)]


def _renderer(template: ChatTemplate) -> Callable[[list[dict[str, Any]], bool], str]:
    why = "the chat template is written in Jinja"
    jinja2, sandbox = (optional_import(module, "jinja2", why) for module in ("jinja2", "jinja2.sandbox"))
    # What transformers gives to templates. They are part of a downloaded tokenizer: they may not reach anything but
    # their arguments.
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
    )
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    try:
        compiled = environment.from_string(template.source)
    except jinja2.TemplateError as error:
        raise DataError(f"the chat template is not valid Jinja ({error}): give another as --chat-template") from error

    def render(messages: list[dict[str, Any]], prompt: bool) -> str:
        try:
            text: str = compiled.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=prompt,
                **template.special_tokens,
            )
            return text
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses it: {error}") from error

    return render


def _generation_tag() -> type:
    """The tag {% generation %}, by which a template may mark what a model says; here it changes nothing."""
    from jinja2 import ext, nodes, parser

    class GenerationTag(ext.Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    return GenerationTag


def _refuse(message: str) -> NoReturn:
    raise TypeError(message)


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def _named_default(value: Any) -> str | None:
    """The template, or that named "default" of several."""
    if isinstance(value, list):
        return {entry["name"]: str(entry["template"]) for entry in value}.get("default")
    return None if value is None else str(value)


def _special_tokens(fields: Mapping[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {name: fields.get(name) for name in names}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}

"""Process that converts conversations to text with a chat template; `megalite.data.chat` starts it.

A template comes with a tokenizer of unknown origin, so it runs in Jinja's sandbox. The sandbox limits neither time nor
memory. The template therefore also runs in a separate process, which cannot open files or start processes. Requests and
answers are lines of JSON on its standard input and output: first the template, its special tokens and its variant for
tools, then one conversation per line: its messages, further variables, and the roles whose messages are to be found. An
answer is `[result]` or `[null, reason]`. If it takes too long, the timer of the process kills it.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes, parser, sandbox

MEMORY = 512 << 20
LONGEST_TEXT = 8 << 20
"""Largest number of characters in a rendered conversation."""
LONGEST_REASON = 200

Render = Callable[[list[dict[str, Any]], bool, Mapping[str, Any]], str]
"""Function from messages, a flag that adds the prompt of an answer, and further variables, to the text."""


class Unusable(ValueError):
    """Error for a template if its text is too long, or does not show where answers begin and end."""


def main(seconds: float) -> None:
    """Answer requests until the input ends; each answer may take `seconds` of CPU time."""
    # The parent process handles the signals that stop a run; this process ends together with it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # Jinja imports some modules only when it needs them. After the limits below, no file can be opened any more.
    with suppress(jinja2.TemplateError):
        uses = "{{ lipsum(1) ~ '\\N{BULLET}' | pprint | wordwrap | striptags ~ raise_exception('') }}"
        compiled(uses, {})([], False, {})
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        with suppress(ValueError, OSError):  # not every system has every limit
            resource.setrlimit(limit, (value, value))
    render: Render | None = None
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            request = json.loads(line)
            answer: list[Any] = [None]
            if render is None:
                render = compiled(*request)
            else:
                messages, variables, roles = request
                answer = [spans_of(messages, variables, roles, render)]
            text = json.dumps(answer)
        except Exception as error:  # a template can raise every error that Python's operators raise
            text = json.dumps([None, reason(error)])
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def compiled(source: str, special_tokens: Mapping[str, str], for_tools: str | None = None) -> Render:
    """Return the template as a function. Raises jinja2.TemplateError if the source is not a valid template."""
    # The environment is the one in which transformers runs templates.
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    usual = environment.from_string(source)
    with_tools = usual if for_tools is None else environment.from_string(for_tools)

    def render(messages: list[dict[str, Any]], prompt: bool, variables: Mapping[str, Any]) -> str:
        template = with_tools if "tools" in variables else usual
        always = {"messages": messages, "add_generation_prompt": prompt}
        text = template.render({"tools": None, "documents": None, **special_tokens, **variables, **always})
        if len(text) > LONGEST_TEXT:
            raise Unusable(f"the chat template makes {len(text)} characters of it; the limit is {LONGEST_TEXT}")
        return text

    return render


def spans_of(
    messages: list[dict[str, Any]], variables: Mapping[str, Any], roles: Collection[str], render: Render
) -> list[tuple[str, int | None]]:
    """Return the text of a conversation in parts, each with the number of the message that it is, of these roles.

    A message begins after the rendered earlier messages, and an answer after these with a prompt for an answer. It ends
    where the rendered messages up to and including it end.
    """
    whole, spans, at = render(messages, False, variables), list[tuple[str, int | None]](), 0
    for number, message in enumerate(messages):
        if message["role"] not in roles:
            continue
        answers = message["role"] == "assistant"
        # Few templates can render no message at all, and what stands before all messages is of the first one.
        before = render(messages[:number], answers, variables) if answers or number else ""
        after = render(messages[: number + 1], False, variables)
        if not (whole.startswith(after) and after.startswith(before) and len(before) >= at):
            what = "the answers" if answers else f"what is said as {message['role'][:LONGEST_REASON]!r}"
            raise Unusable(
                "the chat template renders the beginning of this conversation alone differently than in all of "
                f"it, so {what} cannot be found: give one that does not, as --chat-template"
            )
        if answers:
            _check_header(messages, number, before, whole[len(before) : len(after)], variables, render)
        spans += [(whole[at : len(before)], None), (whole[len(before) : len(after)], number)]
        at = len(after)
    return [*spans, (whole[at:], None)]


def _check_header(
    messages: list[dict[str, Any]], number: int, before: str, answer: str, variables: Mapping[str, Any], render: Render
) -> None:
    """Raise Unusable if an answer has a header that stands before it only where no prompt asks for an answer."""
    header = answer[: max(answer.find(messages[number].get("content", "").strip()), 0)].strip()
    # A template without a header, such as Llama 2's, need not support add_generation_prompt.
    if header and before == render(messages[:number], False, variables):
        raise Unusable(
            f"the chat template does not write {header[:LONGEST_REASON]!r} before an answer if "
            "add_generation_prompt asks for it, so it would be part of the loss: give one that does, as "
            "--chat-template"
        )


class GenerationTag(ext.Extension):
    """Tag {% generation %}, with which a template may mark answers; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: parser.Parser) -> nodes.Node:
        """Return the nodes between the tags."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateRuntimeError(message)


def reason(error: Exception) -> str:
    """Return the error's message as one line of limited length."""
    if isinstance(error, Unusable):
        return str(error)
    if isinstance(error, MemoryError):
        return f"the chat template takes more than {MEMORY >> 20} MiB of memory"
    if isinstance(error, RecursionError):
        return "the chat template or the conversation is nested too deep"
    text = " ".join(str(error)[: 10 * LONGEST_REASON].split())[:LONGEST_REASON]
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"the chat template is not valid Jinja: {text}, line {error.lineno}"
    kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
    return f"the chat template refuses it: {kind}{text}"


if __name__ == "__main__":
    main(float(sys.argv[1]))

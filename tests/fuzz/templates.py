"""A grammar of chat templates: what Jinja can say, of any size."""

from __future__ import annotations

import random

VALID = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_ATOMS = (
    "messages", "messages[0]", "messages[-1].content", "message", "''", "'a'", "'\\ud800'", "0", "1", "-1", "10**9",
    "10.0**400", "10**30", "range(10**9)", "range(99999)", "loop", "self", "none", "true", "bos_token",
    "namespace(a=1)",
    "cycler", "joiner()", "dict(a=1)", "lipsum(n=9)", "[]", "{}", "[1, 2]", "{'a': 1}", "raise_exception", "undefined",
    "'%1000000000d'", "'{:>1000000000}'", "''.__class__", "messages.append", "1e308", "'a' * 10**7", "(1,) * 10**8",
)  # fmt: skip
_FILTERS = (
    "tojson", "tojson(indent=10**9)", "wordwrap(1)", "join", "upper", "length", "list", "reverse", "first", "last",
    "int",
    "float", "abs", "batch(10**9)", "slice(10**9)", "center(10**9)", "indent(10**9)", "replace('', 'aaaa')",
    "map('upper')",
    "attr('__class__')", "groupby('role')", "sort", "unique", "sum", "format(1)", "urlize", "xmlattr", "striptags",
    "trim",
    "dictsort", "selectattr('role')", "truncate(10**9)", "filesizeformat", "pprint", "random", "round(10**9)",
    "safe", "e",
)  # fmt: skip
_METHODS = ("format", "encode", "split", "items", "join", "ljust", "__init__", "mro", "zfill")
_OPERATORS = ("+", "*", "**", "/", "//", "%", "~", "==", "<", "in", "and", "or", "is sameas", "-")
_BLOCKS = (
    "{{% for a in {e} %}}{t}{{% endfor %}}", "{{% if {e} %}}{t}{{% else %}}{t}{{% endif %}}", "{{% set x = {e} %}}{t}",
    "{{% macro f(a) %}}{t}{{{{ f(a) }}}}{{% endmacro %}}{{{{ f({e}) }}}}", "{{% filter upper %}}{t}{{% endfilter %}}",
    "{{% generation %}}{t}{{% endgeneration %}}", "{{% call f() %}}{t}{{% endcall %}}",
    "{{% with a = {e} %}}{t}{{% endwith %}}",
    "{{% for a in range(99999) %}}{t}{{% endfor %}}", "{{% include {e} %}}", "{{% import {e} as m %}}", "{{% break %}}",
    "{{% extends {e} %}}", "{{% block b %}}{t}{{% endblock %}}", "{{% raw %}}{t}", "{{# {t}",
    "{{{{ raise_exception({e}) }}}}",
)  # fmt: skip


def draw_template(draw: random.Random) -> str:
    """A template, mostly a valid one, perhaps with a valid one around it."""
    roll = draw.random()
    if roll < 0.1:
        depth = draw.choice([100, 1000, 20_000])
        begin, end = draw.choice([("(", ")"), ("[", "]"), ("-", ""), ("not ", ""), ("1 + ", "")])
        return "{{ " + begin * depth + "1" + end * depth + " }}"
    if roll < 0.15:
        depth = draw.choice([30, 300, 3000])
        return "{% if 1 %}" * depth + "{% endif %}" * depth
    text = _text(draw, draw.choice([1, 1, 2, 3]))
    at = draw.choice([0, len(VALID), VALID.index("{% if")])
    return draw.choice([text, VALID[:at] + text + VALID[at:]])


def _text(draw: random.Random, depth: int) -> str:
    parts = []
    for _ in range(draw.choice([1, 1, 2])):
        if depth and draw.random() < 0.5:
            parts.append(draw.choice(_BLOCKS).format(e=_expression(draw, depth), t=_text(draw, depth - 1)))
        else:
            parts.append("{{ " + _expression(draw, depth) + " }}")
    return "".join(parts)


def _expression(draw: random.Random, depth: int) -> str:
    if not depth or draw.random() < 0.3:
        return draw.choice(_ATOMS)
    kind = draw.choice(["filter", "filter", "operator", "operator", "call", "item", "method"])
    left = _expression(draw, depth - 1)
    if kind == "filter":
        return f"({left}) | {draw.choice(_FILTERS)}"
    if kind == "operator":
        return f"({left}) {draw.choice(_OPERATORS)} ({_expression(draw, depth - 1)})"
    if kind == "call":
        return f"({left})({_expression(draw, depth - 1)})"
    if kind == "item":
        return f"({left})[{_expression(draw, depth - 1)}]"
    return f"({left}).{draw.choice(_METHODS)}(10**9)"

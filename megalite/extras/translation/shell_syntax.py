"""Syntax trees of shell scripts, as tree-sitter reads them. Nothing is expanded or run here."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from megalite.data.optional import optional_import
from megalite.errors import ConfigurationError
from megalite.small_files import shown

if TYPE_CHECKING:
    import tree_sitter

_DEEPEST = 150
"""Limit for the depth of a syntax tree."""
_SECONDS = 3.0
"""Limit for the time that a script is parsed."""
_PLACEHOLDER = re.compile("(?<!<)<[A-Za-z](?:[^<>\n\"']*[^<>\\s\"'])?>")
_HIDDEN = {letter: 0xE100 + letter for letter in range(128)}
_VISIBLE = {hidden: letter for letter, hidden in _HIDDEN.items()}
PLACEHOLDER = re.compile("\ue13c[^\ue13e]*\ue13e")
"""Placeholder such as <path>, in letters that shells do not take as redirections."""
_VARIABLE = re.compile(r"\\.|\$([A-Za-z_]\w*|\d)", re.ASCII | re.DOTALL)
_WITH_BRACES = re.compile("\\$\\{(\\w+)-\ue002\\}")
"""Variable without braces, in the form that tree-sitter gets: it takes $A/b_$C/d for two words."""
_WITH_SPACES = {"string", "concatenation", "expansion", "heredoc_body"}
"""Kinds of nodes where what lies between the children belongs to the text."""
_SPACE = re.compile(rb"(?:\s|\\[ \t]*\n)*")
_WORDS = {
    *("word", "string", "raw_string", "concatenation", "simple_expansion", "expansion", "number", "extglob_pattern"),
    *("command_substitution", "arithmetic_expansion", "ansi_c_string", "brace_expression"),
}


@dataclass(frozen=True, slots=True)
class Node:
    """Node of a syntax tree: a kind of tree-sitter-bash's grammar, a keyword or an operator, or `space`."""

    kind: str
    line: int
    parts: tuple[Node, ...]
    source: bytes
    begin: int
    end: int

    @property
    def text(self) -> str:
        """Text of the node in the script."""
        return _WITH_BRACES.sub(r"$\1", self.source[self.begin : self.end].decode())


def parse(text: str, line: int | None = None) -> Node:
    """Return the syntax tree of a script.

    Args:
        line: number for all lines, if the text was a word in this line of another script.

    Raises:
        ConfigurationError: the text is not a script, or is nested too deeply; or tree-sitter is not installed.
    """
    why = "launch scripts are read by tree-sitter"
    library = optional_import("tree_sitter", "tree-sitter>=0.25", why)
    grammar = optional_import("tree_sitter_bash", "tree-sitter-bash>=0.25", why)
    text = text.replace("\r\n", "\n").rstrip().removesuffix("\\")
    text = _PLACEHOLDER.sub(lambda found: found[0].translate(_HIDDEN), text)
    source = _VARIABLE.sub(lambda found: f"${{{found[1]}-\ue002}}" if found[1] else found[0], text).encode()
    stop = time.process_time() + _SECONDS
    try:
        tree = library.Parser(library.Language(grammar.language())).parse(
            lambda at, _: source[at : at + 65536], progress_callback=lambda _at, _error: time.process_time() > stop
        )
    except ValueError:
        raise ConfigurationError(f"cannot be read as a shell script within {_SECONDS:.0f} seconds") from None
    if tree.root_node.has_error:
        wrong = _first_error(tree.root_node)
        place = shown(visible(source[wrong.start_byte :][:40].decode(errors="ignore")))
        raise ConfigurationError(f"line {line or wrong.start_point[0] + 1}: not a shell script from {place} on")
    root, ends = _node(tree.root_node, source, line, 0, found := list[int]()), sorted({0, *found, len(source)})
    return parse(b";".join(source[a:b] for a, b in pairwise(ends)).decode(), line) if found else root


def visible(text: str) -> str:
    """Return a text with placeholders as the script has them."""
    return _WITH_BRACES.sub(r"$\1", text.translate(_VISIBLE))


def _first_error(node: tree_sitter.Node) -> tree_sitter.Node:
    """Return the place of a syntax error within a node that has one."""
    while not (node.is_error or node.is_missing):
        inner = next((child for child in node.children if child.has_error or child.is_missing), None)
        if inner is None:
            break
        node = inner
    return node


def _node(found: tree_sitter.Node, source: bytes, line: int | None, depth: int, ends: list[int]) -> Node:
    """Copy a node of tree-sitter, with the spaces between words. Raises ConfigurationError for senseless text."""
    number = line or found.start_point[0] + 1
    if depth > _DEEPEST:
        raise ConfigurationError(f"line {number}: nested deeper than {_DEEPEST} levels")
    begin, parts = found.start_byte, list[Node]()
    if found.type.endswith(
        ("expansion", "substitution", "string", "concatenation", '"')
    ):  # which may have the space before them
        begin = _SPACE.match(source, begin).end()  # type: ignore[union-attr]
    with_spaces, at = found.type in _WITH_SPACES, begin
    for child in [_node(child, source, line, depth + 1, ends) for child in found.children]:
        gap = source[at : child.begin]
        at = child.end
        if with_spaces:
            parts += [Node("space", number, (), source, child.begin - len(gap), child.begin)] if gap else []
        elif not _SPACE.fullmatch(gap):
            raise ConfigurationError(f"line {number}: cannot tell what {shown(gap.decode())} is")
        elif parts and not gap.replace(b"\\\n", b"") and child.kind in (*_WORDS, "command_name"):
            if parts[-1].kind in _WORDS:  # one word, which tree-sitter takes as two
                child = Node("concatenation", number, (parts[-1], child), source, parts.pop().begin, child.end)
            elif parts[-1].kind in ("variable_assignment", "command_name"):
                raise ConfigurationError(f"line {number}: cannot tell whether {shown(child.text)} is a word of its own")
        # The line may end behind assignments: tree-sitter takes the next, or `else`, for the command of two of them.
        if found.type == "command" and parts and parts[-1].kind == "variable_assignment":
            ends += [parts[-1].end] if b"\n" in source[parts[-1].end : child.begin].replace(b"\\\n", b"") else []
        parts += [child] if child.kind != "comment" else []
    if with_spaces and parts and at < found.end_byte:
        parts.append(Node("space", number, (), source, at, found.end_byte))
    return Node(found.type, number, tuple(parts), source, begin, found.end_byte)

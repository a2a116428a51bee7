"""Conditions of shell scripts: which can be decided without a shell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from megalite.extras.translation.shell_expansion import MARK, Expansion
from megalite.extras.translation.shell_syntax import Node

_MOST_TOKENS = 200
_ELEMENTS = re.compile(r"\$\{?@|\[@\]")
QUOTE = re.compile(r"['\"\\]")


class Conditions(Expansion):
    """Variables of a script that is read, and what its conditions on them are."""

    def _test(self, tokens: Sequence[Node], *, pattern: bool) -> bool | None:
        """Decide a condition in brackets; None: only a shell can tell."""
        if len(tokens) > _MOST_TOKENS or any(token.kind == "(" for token in tokens):
            return None
        written = {token.text for token in tokens}
        if not pattern and "!" in written and written & {"-o", "-a"}:
            return None  # how much ! denies in single brackets depends on the number of words
        for joint, wins in (("||", True), ("&&", False), ("-o", True), ("-a", False)):
            for at, token in enumerate(tokens):
                if token.text == joint:
                    if not 0 < at < len(tokens) - 1:  # a word that is compared
                        return None
                    status, kept = self._test(tokens[:at], pattern=pattern), self._uncertain
                    if status is wins and pattern:
                        return wins
                    self._uncertain = token.line if status is None and pattern and kept is None else kept
                    sides = [status, self._test(tokens[at + 1 :], pattern=pattern)]
                    self._uncertain = kept
                    return wins if wins in sides else None if None in sides else not wins
        if tokens and tokens[0].text == "!":
            inner = self._test(tokens[1:], pattern=pattern)
            return None if inner is None else not inner
        texts = [self._known(word) for word in tokens]
        known = [text for text in texts if text is not None]
        if len(known) < len(texts) or any(_ELEMENTS.search(word.text) for word in tokens):
            return None
        if not pattern:  # words without quotes are divided, and an empty one is no word
            bare = [text for text, word in zip(known, tokens, strict=True) if not QUOTE.search(word.text)]
            if any(re.search(r"[\s*?]", text) for text in bare):
                return None
            known = [text for text, word in zip(known, tokens, strict=True) if text or QUOTE.search(word.text)]
        match known:
            case [text] | ["-n", text]:
                return bool(text)
            case ["-z", text]:
                return not text
            case [first, _] if not re.fullmatch("-[a-zA-Z]", first):  # an error, since a word is empty
                return False
            case [left, "=" | "==" | "!=" as relation, right]:
                equal = self._matches(left, tokens[2:]) if pattern else left == right
                return None if equal is None else equal == (relation != "!=")
            case [left, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as relation, right]:
                numbers = [number or "0" if pattern else number for number in (left, right)]
                if not all(re.fullmatch(r"-?(0|[1-9]\d{0,17})", number, re.ASCII) for number in numbers):
                    return None if all(numbers) else False  # an empty number is an error in single brackets
                a, b = map(int, numbers)
                return {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}[relation[1:]]
        return None

    def _matches(self, value: str | None, patterns: Sequence[Node]) -> bool | None:
        """Decide whether a text matches one of some patterns; None: only a shell can tell."""
        undecided = value is None
        for word in patterns:
            text = self._pattern(word)
            if self._known(word) is None or any(not unknown.unset for unknown in self.unknowns(text)):
                undecided = True
            elif value is not None and fnmatchcase(value, MARK.sub("", text)):
                return True
        return None if undecided else False

    def _known(self, word: Node) -> str | None:
        """Return the text of a word in a condition, where variables that nothing sets are empty; None if unknown."""
        text = self._text(word)
        for unknown in self.unknowns(text):
            if not unknown.unset:
                return None
            self._guesses += 1
            note = f"line {word.line}: {unknown.text} is not set, and taken as empty in the condition"
            self.notes += [note] if note not in self.notes else []
        return MARK.sub("", text)


def operands(nodes: Sequence[Node]) -> Iterator[Node]:
    """Yield the operators and words of a condition, in order."""
    for node in nodes:
        if node.kind in ("binary_expression", "unary_expression", "parenthesized_expression", "negation_expression"):
            yield from operands(node.parts)
        else:
            yield node

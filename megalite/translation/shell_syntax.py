"""Syntax of shell scripts: text becomes words, and words become commands. Nothing is expanded or run here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from megalite.errors import ConfigurationError
from megalite.small_files import shown

DEEPEST = 40
"""Limit for the nesting of commands, and of substitutions in a word."""
_REDIRECTION = re.compile(r"\d*(?:<<<|<<-?|>>|>&|<&|<>|>\||>|<)|&>>?")
_OPERATOR = re.compile(r";;&|;;|;&|&&|\|\||\|&|[;&|()]")
_PLACEHOLDER = re.compile(r"<[A-Za-z](?:[^<>\n]*[^<>\s])?>")
_QUOTED_PLACEHOLDER = re.compile(r"<[A-Za-z][^<> \n]* [^<>\n]*>")
_PLAIN = re.compile(r"[^\s\\\"'`$<>;&|()]+")
_PLAIN_IN_QUOTES = re.compile(r"[^\\\"`$<]+")
_MOST_PARTS = 5_000
"""Limit for the number of parts of a word."""
_NAME = re.compile(r"\w+|[@*#?$!-]", re.ASCII)
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=", re.ASCII)


@dataclass(frozen=True)
class Part:
    """Part of a word: plain text, a variable or an arithmetic expression to expand, or what only a shell can tell."""

    kind: Literal["text", "variable", "arithmetic", "shell"]
    text: str
    quoted: bool


@dataclass(frozen=True)
class Word:
    """Word of a command; `array` has the elements if it is the assignment of an array."""

    parts: tuple[Part, ...]
    line: int
    array: tuple[Word, ...] | None = None

    @property
    def plain(self) -> str:
        """Text of a word without quotes and expansions; empty for any other word."""
        simple = len(self.parts) == 1 and self.parts[0].kind == "text" and not self.parts[0].quoted
        return self.parts[0].text if simple else ""


@dataclass(frozen=True)
class Operator:
    """Operator between words, or a redirection; `document` is the text of a here-document and whether it is quoted."""

    text: str
    line: int
    document: tuple[str, bool] | None = None


Token = Word | Operator


class Lexer:
    """Divides a text into words and operators."""

    def __init__(self, text: str, line: int = 1, *, fixed: bool = False, depth: int = 0) -> None:
        if depth > DEEPEST:
            raise ConfigurationError(f"line {line}: nested deeper than {DEEPEST} levels")
        self._text, self._at, self._first, self._fixed, self._depth = text, 0, line, fixed, depth
        self._counted, self._count = 0, 0
        self._documents: tuple[int, int] | None = None

    @property
    def _line(self) -> int:
        if self._fixed:
            return self._first
        self._count += self._text.count("\n", self._counted, self._at)
        self._counted = max(self._counted, self._at)
        return self._first + self._count

    def tokens(self) -> Iterator[Token]:
        """Yield words and operators; the end of a line is an operator.

        Raises:
            ConfigurationError: a quote or a bracket is not closed.
        """
        text = self._text
        while self._at < len(text):
            at, line = self._at, self._line
            if text.startswith("\\\n", at):
                self._at += 2
            elif text[at] in " \t\r":
                self._at += 1
            elif text[at] == "#":
                self._at = (text.find("\n", at) + len(text) + 1) % (len(text) + 1)
            elif text[at] == "\n":
                self._at = self._documents[1] if self._documents and self._documents[0] == at else at + 1
                yield Operator("\n", line)
            elif text.startswith("((", at):
                body = self._enclosed(2, "(", ")", line)
                yield Word((Part("text", "((", False), Part("shell", body, False)), line)
            elif text.startswith(("<(", ">("), at):
                yield Word((Part("shell", f"{text[at]}({self._enclosed(2, '(', ')', line)})", False),), line)
            elif (found := _REDIRECTION.match(text, at)) and not _PLACEHOLDER.match(text, at):
                self._at = found.end()
                yield Operator(found[0].lstrip("0123456789"), line, self._document(found[0]))
            elif found := _OPERATOR.match(text, at):
                self._at = found.end()
                yield Operator(found[0], line)
            else:
                yield self.word()

    def word(self) -> Word:
        """Return the word that begins here."""
        text, line, parts = self._text, self._line, list[Part]()
        while self._at < len(text) and text[self._at] not in " \t\r\n;&|()>":
            at = self._at
            if text[at] == "<":
                found = _PLACEHOLDER.match(text, at)
                if found is None:
                    break
                self._at = found.end()
                parts.append(Part("shell", found[0], False))
            else:
                self._next(parts, quoted=False)
            begin = "".join(part.text for part in parts) if len(parts) < 3 else ""
            if text.startswith("(", self._at) and _ARRAY.fullmatch(begin):
                return Word(tuple(parts), line, self._array(line))
        return Word(tuple(parts), line)

    def quoted(self, end: str | None) -> list[Part]:
        """Return the parts of a text in double quotes, up to its end or that of the complete text."""
        parts, line = [Part("text", "", True)], self._line
        while self._at < len(self._text):
            if end is not None and self._text[self._at] == end:
                self._at += 1
                return parts
            self._next(parts, quoted=True)
        if end is not None:
            raise ConfigurationError(f"line {line}: the quote {end} is not closed")
        return parts

    def unquoted(self) -> list[Part]:
        """Return the parts of a complete text that is not in quotes, with spaces as text."""
        parts = list[Part]()
        while self._at < len(self._text):
            self._next(parts, quoted=False)
        return parts

    def _next(self, parts: list[Part], *, quoted: bool) -> None:
        """Append what begins here: a quoted text, an expansion, or one character."""
        text, at, line = self._text, self._at, self._line
        letter = text[at]
        if letter == "\\":
            self._at += 2
            following = text[at + 1 : at + 2]
            if following != "\n":
                kept = letter if not following or (quoted and following not in '$`"\\') else ""
                parts.append(Part("text", kept + following, True))
        elif letter == '"' and not quoted:
            self._at += 1
            parts += self.quoted('"')
        elif letter == "'" and not quoted:
            end = text.find("'", at + 1)
            if end < 0:
                raise ConfigurationError(f"line {line}: the quote ' is not closed")
            self._at = end + 1
            parts.append(Part("text", text[at + 1 : end], True))
        elif letter == "`":
            end = text.find("`", at + 1)
            if end < 0:
                raise ConfigurationError(f"line {line}: the quote ` is not closed")
            self._at = end + 1
            parts.append(Part("shell", text[at : end + 1], quoted))
        elif letter == "$":
            self._expansion(parts, quoted)
        elif quoted and (found := _QUOTED_PLACEHOLDER.match(text, at)):
            self._at = found.end()
            parts.append(Part("shell", found[0], True))
        else:
            run = (_PLAIN_IN_QUOTES if quoted else _PLAIN).match(text, at)
            self._at = run.end() if run else at + 1
            parts.append(Part("text", text[at : self._at], quoted))
        if len(parts) > _MOST_PARTS:
            raise ConfigurationError(f"line {line}: a word of more than {_MOST_PARTS:,} parts")

    def _expansion(self, parts: list[Part], quoted: bool) -> None:
        text, at, line = self._text, self._at, self._line
        if text.startswith("$((", at) and (body := self._arithmetic()) is not None:
            parts.append(Part("arithmetic", body, quoted))
        elif text.startswith("$(", at):
            parts.append(Part("shell", f"$({self._enclosed(2, '(', ')', line)})", quoted))
        elif text.startswith("${", at):
            parts.append(Part("variable", self._enclosed(2, "{", "}", line, quoted=quoted), quoted))
        elif text.startswith("$'", at) and not quoted:
            self._at = (text.find("'", at + 2) + len(text) + 1) % (len(text) + 1) or len(text)
            parts.append(Part("shell", text[at : self._at], True))
        elif found := _NAME.match(text, at + 1):
            name = found[0] if not found[0][0].isdigit() else found[0][0]
            self._at = at + 1 + len(name)
            parts.append(Part("variable", name, quoted))
        else:
            self._at += 1
            if not (text.startswith('"', self._at) and not quoted):
                parts.append(Part("text", "$", quoted))

    def _arithmetic(self) -> str | None:
        """Return the text of an arithmetic expression; None if this is a command in two brackets."""
        before = self._at
        body = self._enclosed(3, "(", ")", self._line)
        if self._text.startswith(")", self._at):
            self._at += 1
            return body
        self._at = before
        return None

    def _enclosed(self, skip: int, begin: str, end: str, line: int, *, quoted: bool = False) -> str:
        """Return the text up to the bracket that closes those which `skip` passes, and move behind it."""
        text, start, levels = self._text, self._at + skip, 1 + (self._text.startswith("((", self._at))
        at, inside = start, False
        while at < len(text):
            letter = text[at]
            if letter == "\\":
                at += 1
            elif letter == '"':
                inside = not inside
            elif letter == "'" and not quoted and not inside:
                at = text.find("'", at + 1)
                if at < 0:
                    break
            elif inside:
                pass
            elif letter == begin:
                levels += 1
            elif letter == end:
                levels -= 1
                if not levels:
                    self._at = at + 1
                    return text[start:at]
            at += 1
        raise ConfigurationError(f"line {line}: the bracket {shown(text[self._at : self._at + 20])} is not closed")

    def _array(self, line: int) -> tuple[Word, ...]:
        self._at += 1
        inner = Lexer(self._text, depth=self._depth + 1)
        inner._at, inner._counted, inner._first, inner._fixed = self._at, self._at, self._line, self._fixed
        words = list[Word]()
        for token in inner.tokens():
            if isinstance(token, Word):
                words.append(token)
            elif token.text == ")":
                self._at = inner._at
                return tuple(words)
            elif token.text != "\n":
                raise ConfigurationError(f"line {line}: {token.text!r} in an array")
        raise ConfigurationError(f"line {line}: the bracket of an array is not closed")

    def _document(self, operator: str) -> tuple[str, bool] | None:
        """Return the here-document that a redirection announces, whose lines the lexer then passes over."""
        operator = operator.lstrip("0123456789")
        if operator not in ("<<", "<<-"):
            return None
        while self._text[self._at : self._at + 1] in (" ", "\t"):
            self._at += 1
        word = self.word()
        delimiter = "".join(part.text for part in word.parts)
        first = self._documents[0] if self._documents and self._documents[0] >= self._at else None
        line_end = self._text.find("\n", self._at) if first is None else first
        at = begin = line_end + 1 if first is None else (self._documents or (0, 0))[1]
        while line_end >= 0 and at < len(self._text):
            end = (self._text.find("\n", at) + len(self._text) + 1) % (len(self._text) + 1)
            line = self._text[at:end]
            if (line.lstrip("\t") if operator == "<<-" else line) == delimiter:
                self._documents = (line_end, min(end + 1, len(self._text)))
                return self._text[begin:at], any(part.quoted for part in word.parts)
            at = end + 1
        raise ConfigurationError(f"line {word.line}: no line ends the text after << {shown(delimiter)}")


# ---------------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True)
class Simple:
    """Command of words, with the here-documents that it reads."""

    words: tuple[Word, ...]
    documents: tuple[tuple[str, bool], ...] = ()


@dataclass(frozen=True)
class Test:
    """Condition in double brackets."""

    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Choice:
    """If: conditions with the commands of each; the condition of `else` is None."""

    branches: tuple[tuple[Body | None, Body], ...]


@dataclass(frozen=True)
class Case:
    """Case: a word, and patterns with the commands of each."""

    word: Word
    branches: tuple[tuple[tuple[Word, ...], Body], ...]


@dataclass(frozen=True)
class Loop:
    """Loop: its variable, or its condition; `until` loops have neither."""

    variable: str
    condition: Body | None
    body: Body


@dataclass(frozen=True)
class Function:
    """Definition of a function."""

    name: str
    body: Body


@dataclass(frozen=True)
class Step:
    """Command of a list, and how it depends on the one before: `;` (not at all), `&&` or `||`."""

    joint: str
    command: Compound
    line: int
    negated: bool = False


@dataclass(frozen=True)
class Body:
    """List of commands; a subshell keeps what it assigns to itself."""

    steps: tuple[Step, ...]
    subshell: bool = False


Compound = Simple | Test | Choice | Case | Loop | Function | Body


class Parser:
    """Builds commands from words."""

    def __init__(self, tokens: Iterator[Token]) -> None:
        self._tokens, self._at, self._depth = list(tokens), 0, 0

    def script(self) -> Body:
        """Return the commands of a complete script."""
        body = self._body(())
        if self._at < len(self._tokens):
            self._wrong()
        return body

    def _wrong(self) -> None:
        token = self._tokens[self._at] if self._at < len(self._tokens) else None
        if token is None:
            raise ConfigurationError("the script ends within a command (if, for, case or a bracket)")
        name = token.text if isinstance(token, Operator) else "".join(part.text for part in token.parts)
        raise ConfigurationError(f"line {token.line}: did not expect {shown(name)} here")

    def _plain(self) -> str:
        """Return the next token if it is a plain word or an operator."""
        if self._at >= len(self._tokens):
            return ""
        token = self._tokens[self._at]
        return token.text if isinstance(token, Operator) else token.plain

    def _take(self, *expected: str) -> str:
        found = self._plain()
        if found not in expected:
            self._wrong()
        self._at += 1
        return found

    def _skip(self, *texts: str) -> None:
        while self._at < len(self._tokens) and self._plain() in texts:
            self._at += 1

    def _body(self, ends: tuple[str, ...]) -> Body:
        """Return the commands up to one of these words, which is not taken."""
        self._depth += 1
        if self._depth > DEEPEST:
            raise ConfigurationError(f"commands are nested deeper than {DEEPEST} levels")
        steps, joint = list[Step](), ";"
        while self._at < len(self._tokens):
            if self._plain() in ("\n", ";", "&", "|", "|&"):
                self._at += 1
                joint = ";"
            elif self._plain() in ("&&", "||"):
                joint = self._take("&&", "||")
                self._skip("\n")
            elif self._plain() in ends:
                break
            else:
                line, before = self._tokens[self._at].line, self._at
                negated = self._plain() == "!"
                self._at += negated
                steps.append(Step(joint, self._command(), line, negated))
                joint = ";"
                if self._at == before:
                    self._wrong()
        self._depth -= 1
        return Body(tuple(steps))

    def _command(self) -> Compound:
        kinds: dict[str, Callable[[], Compound]] = {
            "if": self._choice,
            "case": self._case,
            "[[": self._test,
            "{": self._group,
            "(": self._group,
        }
        kinds |= dict.fromkeys(("for", "while", "until", "select"), self._loop)
        first = self._plain()
        if first in ("then", "elif", "else", "fi", "do", "done", "esac", "}", ")", ";;", ";&", ";;&"):
            self._wrong()
        if first in kinds:
            command = kinds[first]()
            self._redirections()
            return command
        if first == "function" or (first and self._ahead(1) == "(" and self._ahead(2) == ")"):
            self._at += first == "function"
            name = self._plain()
            self._at += 1
            self._skip("(", ")", "\n")
            body = self._command()
            return Function(name, body if isinstance(body, Body) else Body((Step(";", body, 0),)))
        return self._simple()

    def _ahead(self, count: int) -> str:
        token = self._tokens[self._at + count] if self._at + count < len(self._tokens) else None
        return token.text if isinstance(token, Operator) else ""

    def _group(self) -> Body:
        end = {"{": "}", "(": ")"}[self._take("{", "(")]
        body = self._body((end,))
        self._take(end)
        return Body(body.steps, subshell=end == ")")

    def _choice(self) -> Choice:
        branches = list[tuple[Body | None, Body]]()
        keyword = self._take("if")
        while keyword != "fi":
            condition = None
            if keyword != "else":
                condition = self._body(("then",))
                self._take("then")
            branches.append((condition, self._body(("elif", "else", "fi"))))
            keyword = self._take("fi") if condition is None else self._take("elif", "else", "fi")
        return Choice(tuple(branches))

    def _loop(self) -> Loop:
        keyword, variable, condition = self._take("for", "select", "while", "until"), "", None
        if keyword in ("for", "select"):
            token = self._tokens[self._at] if self._at < len(self._tokens) else None
            named = re.search(r"[A-Za-z_]\w*", token.parts[-1].text) if isinstance(token, Word) else None
            variable = named[0] if named else ""
            while self._at < len(self._tokens) and self._plain() != "do":
                self._at += 1
        else:
            condition = self._body(("do",))
        self._take("do")
        body = self._body(("done",))
        self._take("done")
        return Loop(variable, condition if keyword == "while" else None, body)

    def _case(self) -> Case:
        self._take("case")
        word = self._tokens[self._at] if self._at < len(self._tokens) else None
        if not isinstance(word, Word):
            self._wrong()
            raise AssertionError
        self._at += 1
        self._skip("\n")
        self._take("in")
        branches = list[tuple[tuple[Word, ...], Body]]()
        self._skip("\n", ";")
        while self._plain() != "esac":
            self._skip("(")
            patterns = list[Word]()
            while self._at < len(self._tokens) and self._plain() != ")":
                token = self._tokens[self._at]
                patterns += [token] if isinstance(token, Word) else []
                self._at += 1
            self._take(")")
            branches.append((tuple(patterns), self._body((";;", ";&", ";;&", "esac"))))
            self._skip(";;", ";&", ";;&", "\n")
        self._take("esac")
        return Case(word, tuple(branches))

    def _test(self) -> Test:
        self._take("[[")
        begin = self._at
        while self._at < len(self._tokens) and self._plain() != "]]":
            self._at += 1
        tokens = self._tokens[begin : self._at]
        self._take("]]")
        return Test(tuple(token for token in tokens if isinstance(token, Word) or token.text != "\n"))

    def _redirections(self) -> tuple[tuple[str, bool], ...]:
        """Pass over redirections. Returns the here-documents among them."""
        documents = list[tuple[str, bool]]()
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            if not isinstance(token, Operator) or token.text[0] not in "<>&" or token.text in ("&", "&&"):
                break
            self._at += 1
            if token.document is not None:
                documents.append(token.document)
            elif self._at < len(self._tokens) and isinstance(self._tokens[self._at], Word):
                self._at += 1
        return tuple(documents)

    def _simple(self) -> Simple:
        words, documents = list[Word](), list[tuple[str, bool]]()
        while self._at < len(self._tokens):
            documents += self._redirections()
            token = self._tokens[self._at] if self._at < len(self._tokens) else None
            if not isinstance(token, Word):
                break
            words.append(token)
            self._at += 1
        return Simple(tuple(words), tuple(documents))


def parse(text: str, line: int = 1, *, fixed: bool = False) -> Body:
    """Return the commands of a script, which is not run.

    Args:
        line: number of its first line.
        fixed: all of it counts as this line, because it was a word of another script.
    """
    return Parser(Lexer(text, line, fixed=fixed).tokens()).script()

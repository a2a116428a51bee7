"""Reading of shell scripts: which commands a script would run, with which words. Nothing is run or evaluated.

What only a shell, or this machine, could tell (the output of a command, a variable that nothing sets, a condition on
files) becomes an `Unknown`. It stays within the words that it reaches, as a number between two marks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any

from megalite.errors import ConfigurationError
from megalite.small_files import MIB
from megalite.translation.shell_syntax import (
    Body,
    Case,
    Choice,
    Function,
    Lexer,
    Loop,
    Operator,
    Part,
    Simple,
    Test,
    Token,
    Word,
    parse,
)

LARGEST = MIB // 4
"""Largest size of a script, and of a value in it, in characters."""
_MOST_WORK = 4 * MIB
"""Limit for the number of characters that all expansions of a script give together."""
_MOST_STEPS, _MOST_CALLS = 20_000, 20
_BEGIN, _END = "\ue000", "\ue001"
_MARK = re.compile(f"{_BEGIN}(\\d+){_END}")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=", re.ASCII)
_PARAMETER = re.compile(r"(#?)(\w+|[@*#?$!-])(?:\[([^]]*)\])?(?:(:?[-=+?])(.*))?", re.ASCII | re.DOTALL)
_BRACES = re.compile(r"\{([^{}\s]*)\}")
_SUCCEED = ("cd", "mkdir", "echo", "set", "module", "date", "pushd", "popd", "printf", ":", "true", "shift", "ulimit")
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_FILES_AND_COMMANDS = ("read", "mapfile", "readarray", "getopts", "let", "((")


@dataclass
class Unknown:
    """Value that only a shell can tell: its text in the script, and the variable that could be given for it."""

    text: str
    line: int
    name: str | None = None
    unset: bool = False


@dataclass(frozen=True)
class Command:
    """Command that the script would run.

    Attributes:
        words: the program and its arguments.
        environment: variables that the script exports to it.
        before: words of the command that starts the shell which runs this command, such as `srun`'s.
    """

    words: tuple[str, ...]
    line: int
    environment: Mapping[str, str]
    before: tuple[str, ...] = ()


class Script:
    """State of a script that is read.

    Attributes:
        commands: all commands, in order.
        headers: words of its `#SBATCH` lines.
        notes: lines about what was assumed.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.commands: list[Command] = []
        self.headers: list[str] = []
        self.notes: list[str] = []
        self._given = dict(variables)
        self._variables: dict[str, str | list[str]] = dict(variables)
        self._exported: set[str] = set()
        self._functions: dict[str, Body] = {}
        self._locals: list[dict[str, str | list[str] | None]] = []
        self._unknowns: list[Unknown] = []
        self._before: tuple[str, ...] = ()
        self._uncertain: int | None = None
        self._shifted = 0
        self._steps, self._work, self._calls = 0, 0, 0

    def read(self, text: str, line: int = 1, *, fixed: bool = False) -> None:
        """Follow the commands of a text.

        Raises:
            ConfigurationError: it is not a shell script, or is larger than a limit.
        """
        if len(text) > LARGEST:
            raise ConfigurationError(f"more than {LARGEST:,} characters: too large for a launch script")
        self.headers += [w for header in re.findall(r"^#SBATCH\s(.*)", text, re.MULTILINE) for w in header.split()]
        self._run(parse(text, line, fixed=fixed))

    def unknowns(self, text: str) -> list[Unknown]:
        """Return what is not known in a word."""
        return [self._unknowns[int(number)] for number in _MARK.findall(text)]

    def shown(self, text: str) -> str:
        """Return a word with the script's own text in place of what is not known."""
        return _MARK.sub(lambda found: self._unknowns[int(found[1])].text, text)

    def _unknown(self, text: str, line: int, name: str | None = None, *, unset: bool = False) -> str:
        self._unknowns.append(Unknown(" ".join(self.shown(text).split())[:80], line, name, unset))
        return f"{_BEGIN}{len(self._unknowns) - 1}{_END}"

    # ------------------------------------------------------------------------------------------------ commands

    def _run(self, body: Body) -> bool | None:
        """Follow a list of commands. Returns whether the last one succeeds; None: only a shell can tell."""
        status: bool | None = True
        for step in body.steps:
            self._count()
            if step.joint == ";" or status is None or status == (step.joint == "&&"):
                decided = step.joint == ";" or status is not None
                with self._depending_on(None if decided else step.line):
                    found = self._run_one(step.command, step.line)
                found = (None if found is None else not found) if step.negated else found
                status = found if decided else None
        return status

    def _count(self) -> None:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise ConfigurationError(f"the script runs more than {_MOST_STEPS:,} commands: too many to follow")

    @contextmanager
    def _depending_on(self, line: int | None) -> Iterator[None]:
        """Treat what is assigned in the block as unknown if a condition in this line cannot be decided."""
        before = self._uncertain
        self._uncertain = line if before is None else before
        yield
        self._uncertain = before

    def _run_one(self, command: object, line: int) -> bool | None:
        match command:
            case Simple():
                return self._simple(command, line)
            case Test(tokens):
                return self._test(tokens, pattern=True)
            case Choice(branches):
                return self._choice(branches, line)
            case Case():
                return self._case(command, line)
            case Loop():
                return self._loop(command, line)
            case Function(name, body):
                self._functions[name] = body
                return True
            case Body():
                outer = dict(self._variables)
                status = self._run(command)
                self._variables = outer if command.subshell else self._variables
                return status
        raise AssertionError(command)

    def _choice(self, branches: Sequence[tuple[Body | None, Body]], line: int) -> bool | None:
        decided = True
        for condition, body in branches:
            holds = True if condition is None else self._run(condition)
            if holds is False:
                continue
            decided = decided and holds is True
            with self._depending_on(None if decided else line):
                status = self._run(body)
            if decided:
                return status
            if holds:
                break
        return True if decided else None

    def _case(self, case: Case, line: int) -> bool | None:
        value = self._known(case.word)
        for patterns, body in case.branches:
            texts = ["".join(self._fields(word, split=False)) for word in patterns]
            if value is not None and not any(fnmatchcase(value, text) for text in texts):
                continue
            with self._depending_on(line if value is None else None):
                self._run(body)
            if value is not None:
                break
        return None

    def _loop(self, loop: Loop, line: int) -> bool | None:
        if loop.condition is not None and self._run(loop.condition) is False:
            return True
        commands, notes = len(self.commands), len(self.notes)
        for _ in range(2):  # the second time, it is known what the loop changes
            del self.commands[commands:], self.notes[notes:]
            with self._depending_on(line):
                if loop.variable:
                    self._assign(loop.variable, "", line)
                self._run(loop.body)
        return None

    def _simple(self, command: Simple, line: int) -> bool | None:
        words = list(command.words)
        own: dict[str, str] = {}
        while words and (place := _assignment(words[0])) is not None:
            word = words.pop(0)
            own |= self._assign_word(word, place, lasting=not words)
        fields = [field for word in words for field in self._argument(word)]
        if not fields:
            return True
        name = fields[0]
        if name in _DECLARE:
            self._declare(name, words[1:], fields[1:])
        elif name in _FILES_AND_COMMANDS or fields[:2] == ["printf", "-v"]:
            text = " ".join(fields[1:]) if name != "((" else words[0].parts[-1].text
            with self._depending_on(line):
                for target in re.findall(r"\b[A-Za-z_]\w*", text, re.ASCII):
                    self._assign(target, "", line)
        elif name in ("[", "test"):
            tokens: tuple[Token, ...] = words[1:-1] if name == "[" else words[1:]  # type: ignore[assignment]
            return self._test(tuple(tokens), pattern=False)
        elif name == "false":
            return False
        elif name == "unset":
            for target in fields[1:]:
                self._assign(target, "", line)
                if target not in self._given and self._uncertain is None:
                    del self._variables[target]
        elif fields[:2] == ["set", "--"]:
            for number in range(1, 100):
                self._variables.pop(str(number), None)
            self._variables |= {str(number): value for number, value in enumerate(fields[2:], 1)} | self._given
            self._shifted = 0
        elif name == "shift":
            self._shifted += int(fields[1]) if fields[1:] and fields[1].isdecimal() and len(fields[1]) < 4 else 1
        elif name in (".", "source"):
            self.notes.append(f"line {line}: {self.shown(' '.join(fields[:2]))} is not read; --set gives what it sets")
        elif name in self._functions and self._calls < _MOST_CALLS:
            return self._call(self._functions[name], fields[1:])
        else:
            self._run_program(fields, own, command, line)
        return True if name in _SUCCEED or name in _DECLARE else None

    def _call(self, body: Body, arguments: Sequence[str]) -> bool | None:
        outer = {name: self._variables.pop(name) for name in list(self._variables) if name.isdecimal()}
        shifted, self._shifted = self._shifted, 0
        self._variables |= {str(number): value for number, value in enumerate(arguments, 1)}
        self._calls += 1
        self._locals.append({})
        status = self._run(body)
        for name, value in self._locals.pop().items():
            self._variables.pop(name, None)
            self._variables |= {} if value is None else {name: value}
        self._calls -= 1
        for name in [name for name in self._variables if name.isdecimal()]:
            del self._variables[name]
        self._variables |= outer
        self._shifted = shifted
        return status

    def _run_program(self, fields: list[str], own: Mapping[str, str], command: Simple, line: int) -> None:
        """Record a command; follow the script that it gives to a shell, if any."""
        environment = {n: v for n in self._exported if isinstance(v := self._variables.get(n), str)} | dict(own)
        names = [PurePath(field).name for field in fields]
        shell = next((at for at, name in enumerate(names) if name in ("bash", "sh")), len(fields))
        option = next((at for at in range(shell, len(fields)) if re.fullmatch(r"-[a-z]*c", fields[at])), len(fields))
        if names[0] == "eval":
            self._within(" ".join(fields[1:]), line)
        elif option + 1 < len(fields):
            self._inner(fields[option + 1], environment, tuple(fields[:shell]), line)
        elif command.documents and (names[0] == "sbatch" or shell < len(fields)):
            for text, quoted in command.documents:
                if not quoted:  # a shell expands variables in it, but quotes are text
                    text = self._joined(Lexer(text, line, fixed=True).quoted(None), line)
                self._inner(text, environment, tuple(fields[:shell]), line)
        else:
            self.commands.append(Command(tuple(fields), line, environment, self._before))

    def _inner(self, text: str, environment: Mapping[str, str], before: tuple[str, ...], line: int) -> None:
        """Follow the script of another shell, which has the exported variables alone."""
        kept = self._variables, self._before, self._shifted
        self._variables, self._before = {**environment, **self._given}, (*self._before, *before)
        self._within(text, line)
        self._variables, self._before, self._shifted = kept

    def _within(self, text: str, line: int) -> None:
        """Follow a text that is a word of this script."""
        if self._calls >= _MOST_CALLS:
            raise ConfigurationError(f"line {line}: more than {_MOST_CALLS} shells within each other")
        self._calls += 1
        self.read(text, line, fixed=True)
        self._calls -= 1

    # ------------------------------------------------------------------------------------------------ variables

    def _argument(self, word: Word) -> list[str]:
        """Return the words that a word of a command becomes."""
        if word.array is not None:  # of declare, which assigns it
            return ["".join(part.text for part in word.parts)]
        return self._fields(word)

    def _declare(self, keyword: str, words: Sequence[Word], fields: Sequence[str]) -> None:
        names = [re.split(r"\+?=|\[", field)[0] for field in fields if not field.startswith("-")]
        if self._locals and keyword in ("local", "declare", "typeset"):
            before = {name: self._variables.get(name) for name in names}
            self._locals[-1] = before | self._locals[-1]
        for word in words:
            if (place := _assignment(word)) is not None:
                self._assign_word(word, place, lasting=True)
        if keyword == "export" or any(re.match("-[a-z]*x", field) for field in fields):
            self._exported |= set(names)

    def _assign_word(self, word: Word, place: re.Match[str], *, lasting: bool) -> dict[str, str]:
        """Assign a variable. Returns its new value, or nothing if it is not only a text."""
        name, index, append = place[1], place[2], place[3]
        first, *others = word.parts
        value = Word((Part("text", first.text[place.end() :], first.quoted), *others), word.line)
        if word.array is not None:
            elements = [field for element in word.array for field in self._fields(element)]
            self._assign(name, elements, word.line, append=bool(append))
        elif index:
            with self._depending_on(word.line):
                self._assign(name, "", word.line)
        else:
            (text,) = self._fields(value, split=False)
            before = self._variables.get(name, "")
            first_element = before if isinstance(before, str) else "".join(before[:1])
            text = first_element + text if append else text
            if lasting:
                self._assign(name, text if isinstance(before, str) else [text, *before[1:]], word.line)
            return {name: text}
        return {}

    def _assign(self, name: str, value: str | list[str], line: int, *, append: bool = False) -> None:
        if name in self._given:
            return
        if name == "IFS":
            self.notes.append(f"line {line}: IFS is not followed; words are divided at white space")
        if self._uncertain is not None:
            text = f"${name}, which depends on line {self._uncertain}"
            unknown = self._unknown(text, line, name)
            value = [unknown] if isinstance(value, list) else unknown
        if append and isinstance(value, list):
            before = self._variables.get(name, [])
            value = [*(before if isinstance(before, list) else [before]), *value]
        if isinstance(value, str):
            whole = _MARK.fullmatch(value) is not None
            for each in self.unknowns(value):  # it can be given by this name, too
                if (each.name is None and "--" not in value) or (each.unset and whole):
                    each.name = name
        self._variables[name] = value
        self._charge(value)

    def _charge(self, value: str | Sequence[str]) -> None:
        size = len(value) if isinstance(value, str) else sum(len(each) + 1 for each in value)
        self._work += size
        if size > LARGEST or self._work > _MOST_WORK:
            raise ConfigurationError("the values of the script's variables are too large to follow")

    # ------------------------------------------------------------------------------------------------ expansion

    def _fields(self, word: Word, *, split: bool = True) -> list[str]:
        """Return the words that a word becomes when its variables are replaced, or one text without `split`."""
        fields, current = list[str](), None
        parts = _with_home(word.parts)
        for part in parts:
            values = self._values(part, word.line)
            if part.kind == "text" or not split or (part.quoted and len(values) == 1):
                current = (current or "") + " ".join(values)
                continue
            pieces = list(values)
            if not part.quoted:
                text = "\0".join(values)  # the elements of an array stay apart
                pieces = [each for value in text.split("\0") for each in value.split()]
                if text[:1].isspace() and current is not None:
                    fields.append(current)
                    current = None
            if pieces:
                fields += [(current or "") + pieces[0], *pieces[1:]]
                current = fields.pop()
                if not part.quoted and text[-1:].isspace():
                    fields.append(current)
                    current = None
        if current is not None or not split:
            fields.append(current or "")
        self._charge(fields)
        return fields

    def _joined(self, parts: Sequence[Part], line: int) -> str:
        return "".join(" ".join(self._values(part, line)) for part in parts)

    def _values(self, part: Part, line: int) -> list[str]:
        """Return what a part becomes: one text, or several for an array."""
        if part.kind == "text":
            several = not part.quoted and any("," in each or ".." in each for each in _BRACES.findall(part.text))
            return [self._unknown(part.text, line) if several else part.text]
        if part.kind == "shell":
            return [self._unknown(part.text, line)]
        if part.kind == "arithmetic":
            return [self._arithmetic(part.text, line)]
        return self._parameter(part, line)

    def _parameter(self, part: Part, line: int) -> list[str]:
        found = _PARAMETER.fullmatch(part.text)
        if found is None:
            return [self._unknown(f"${{{part.text}}}", line)]
        length, name, index, operator, otherwise = found.groups()
        value = self._look_up(name)
        if length:
            if isinstance(value, list) and index in ("@", "*"):
                return [str(len(value)) if not any(map(self.unknowns, value)) else self._unknown(part.text, line)]
            plain = isinstance(value, str) and not self.unknowns(value)
            return [str(len(value or "")) if plain else self._unknown(f"${{{part.text}}}", line)]
        if index in ("@", "*") and isinstance(value, str) and name in self._given:
            value = value.split()
        if isinstance(value, list) and name not in "@*":
            value = value if index in ("@", "*") else self._element(value, index or "0", part, line)
        elif index not in (None, "@", "*", "0"):
            return [self._unknown(f"${{{part.text}}}", line)]
        if operator is not None:
            empty = value is None or (operator.startswith(":") and value in ("", [], [""]))
            if operator[-1] == "+":
                return [""] if empty else [self._otherwise(otherwise, part.quoted, line)]
            if empty and operator[-1] in "-=":
                text = self._otherwise(otherwise, part.quoted, line)
                if operator[-1] == "=":
                    self._assign(name, text, line)
                return [text]
            if empty and name in self._variables:
                value = None
        if value is None:
            return [self._unknown(f"${name}", line, name if name[0].isalnum() or name[0] == "_" else None, unset=True)]
        if isinstance(value, str):
            return [value]
        joined = index == "*" or name == "*"
        return [" ".join(value)] if joined and part.quoted else value

    def _look_up(self, name: str) -> str | list[str] | None:
        """Return the value of a variable, or of an argument of the script; None if it is not set."""
        if name == "0":
            return "script"
        if name.isdecimal():
            return self._variables.get(str(int(name[:6]) + self._shifted))
        if name in ("@", "*", "#"):
            numbers = sorted(int(each) for each in self._variables if each.isdecimal())
            values = [str(self._variables[str(number)]) for number in numbers if number > self._shifted]
            return str(len(values)) if name == "#" else values
        return self._variables.get(name)

    def _element(self, values: list[str], index: str, part: Part, line: int) -> str | None:
        text = index if index.isdecimal() else self._arithmetic(index, line)
        if any(map(self.unknowns, values)) or not text.isdecimal() or len(text) > 6:
            return self._unknown(f"${{{part.text}}}", line)
        return values[int(text)] if int(text) < len(values) else None

    def _otherwise(self, text: str, quoted: bool, line: int) -> str:
        lexer = Lexer(text, line, fixed=True, depth=text.count("${"))
        return self._joined(lexer.quoted(None) if quoted else lexer.unquoted(), line)

    def _arithmetic(self, text: str, line: int) -> str:
        """Return the value of an arithmetic expression of whole numbers."""
        expanded = self._otherwise(text, True, line)
        plain = re.fullmatch(r"[\w\s()+*/%-]{1,200}", expanded, re.ASCII)
        if plain and not re.search(r"\*\*|\d_|\b0[bBoO]", expanded):  # which are not what they are in Python
            with suppress(SyntaxError, ValueError, RecursionError, MemoryError, ArithmeticError):
                tree = ast.parse(expanded.strip().replace("/", "//"), mode="eval")
                value = self._number(tree.body)
                if -(2**63) <= value < 2**63:
                    return str(value)
        return self._unknown(f"$(({text}))", line)

    def _number(self, node: Any) -> int:
        """Return the value of a node of an expression, as shells calculate it. Raises ValueError for anything else."""
        match node:
            case ast.Constant(value=value) if type(value) is int:
                return value
            case ast.Name(id=name) if re.fullmatch(r"-?(0|[1-9]\d{0,17})", str(self._variables.get(name, ""))):
                return int(str(self._variables[name]))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand)
            case ast.BinOp(left=left, op=operator, right=right):
                a, b = self._number(left), self._number(right)
                if max(abs(a), abs(b)) < 2**63:
                    match operator:
                        case ast.Add():
                            return a + b
                        case ast.Sub():
                            return a - b
                        case ast.Mult():
                            return a * b
                        case ast.FloorDiv():  # shells round towards zero
                            return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
                        case ast.Mod():
                            return abs(a) % abs(b) * (-1 if a < 0 else 1)
        raise ValueError

    # ------------------------------------------------------------------------------------------------ conditions

    def _test(self, tokens: Sequence[Token], *, pattern: bool) -> bool | None:
        """Decide a condition in brackets; None: only a shell can tell."""
        for joint, wins in (("||", True), ("&&", False), ("-o", True), ("-a", False)):
            for at, token in enumerate(tokens):
                if (token.text if isinstance(token, Operator) else token.plain) == joint:
                    sides = [self._test(tokens[:at], pattern=pattern), self._test(tokens[at + 1 :], pattern=pattern)]
                    return wins if wins in sides else None if None in sides else not wins
        if any(isinstance(token, Operator) for token in tokens):
            return None
        words = [token for token in tokens if isinstance(token, Word)]
        if words and words[0].plain == "!":
            inner = self._test(words[1:], pattern=pattern)
            return None if inner is None else not inner
        texts = [self._known(word) for word in words]
        known = [text for text in texts if text is not None]
        if len(known) < len(texts):
            return None
        if not pattern:  # an empty word without quotes is no word
            known = [text for text, word in zip(known, words, strict=True) if text or any(p.quoted for p in word.parts)]
        match known:
            case [text]:
                return bool(text)
            case ["-n", text]:
                return bool(text)
            case ["-z", text]:
                return not text
            case [first, _] if not re.fullmatch("-[a-zA-Z]", first):  # an error, since a word is empty
                return False
            case [left, "=" | "==" | "!=" as relation, right]:
                quoted = any(part.quoted for part in words[2].parts)
                equal = fnmatchcase(left, right) if pattern and not quoted else left == right
                return equal == (relation != "!=")
            case [left, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as relation, right]:
                numbers = [number or "0" if pattern else number for number in (left, right)]
                if not all(re.fullmatch(r"-?\d{1,18}", number, re.ASCII) for number in numbers):
                    return None if all(numbers) else False  # an empty number is an error in single brackets
                a, b = map(int, numbers)
                return {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}[relation[1:]]
        return None

    def _known(self, word: Word) -> str | None:
        """Return the text of a word in a condition, where variables that nothing sets are empty; None if unknown."""
        (text,) = self._fields(word, split=False)
        for unknown in self.unknowns(text):
            if not unknown.unset:
                return None
            note = f"line {word.line}: {unknown.text} is not set, and taken as empty in the condition"
            self.notes += [note] if note not in self.notes else []
        return _MARK.sub("", text)


def _assignment(word: Word) -> re.Match[str] | None:
    first = word.parts[0] if word.parts else None
    return _ASSIGNMENT.match(first.text) if first is not None and first.kind == "text" and not first.quoted else None


def _with_home(parts: Sequence[Part]) -> Sequence[Part]:
    """Return the parts of a word with $HOME for a tilde at its begin."""
    if parts and parts[0].kind == "text" and not parts[0].quoted and re.match(r"~(/|$)", parts[0].text):
        return (Part("variable", "HOME", True), Part("text", parts[0].text[1:], False), *parts[1:])
    return parts

"""Variables and arguments of shell scripts: what assignments, declarations, `unset`, `set` and `shift` make of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from megalite.errors import ConfigurationError
from megalite.extras.translation.shell_conditions import Conditions
from megalite.extras.translation.shell_syntax import Node

CHANGING = ("read", "mapfile", "readarray", "getopts", "let")
_BUILTINS = {*CHANGING, "printf", "eval", "source", ".", "set", "shift", "unset", "export", "declare", "readonly"}
_OPTIONS = {"-s", "-u", "checkwinsize", "expand_aliases", "inherit_errexit"}
"""Options of `shopt` that change no word, with `alias` refused."""
_SET_OPTIONS = {
    *("allexport", "errexit", "errtrace", "functrace", "hashall", "monitor", "noclobber", "noglob", "notify"),
    *("nounset", "pipefail", "verbose", "xtrace"),
}
"""Options of `set -o` that are followed, or change no word and no command."""
_NO_FUNCTIONS = {
    *("if", "then", "elif", "else", "fi", "for", "in", "until", "while", "do", "done", "case", "esac", "select"),
    *("function", "time", "coproc", "{", "}", "[[", "]]", "!", "["),
    *("declare", "typeset", "export", "readonly", "local", "unset", "unsetenv"),
}
"""Names that bash, or tree-sitter, does not take for a call of a function."""
_SHELL_OPTION = re.compile(r"[-+][bcefhilmosuvxCET]+|--(login|noediting|noprofile|norc)?")
"""Options of a shell that change no word and no command."""
_OF_NO_COMMANDS = re.compile(r"#!.*\s[-+][A-Za-z]*[knt].*")
"""First line of a script for a shell that runs no commands, one of them, or others."""
_SUBSCRIPT = re.compile(r"\[.*\]\+?=", re.DOTALL)
"""Element of an array that says its own place."""

_HIDDEN_ASSIGNMENT = re.compile(r"\$\(\([^)]*?((?<![=!<>])=(?!=)|\+\+|--)")
_DECLARE_OPTIONS = "aAfFgiIlnprtux-"
_DECLARATION_OPTIONS = {"export": "fnp-", "readonly": "aAfp-"}
"""Letters of options; bash runs a declaration with any other as if it were not there."""


class Declarations(Conditions):
    """Variables, arguments and functions of a script that is read."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__(variables)
        self._exported: set[str] = set()
        self._locals: list[dict[str, str | list[str] | None]] = []
        self._functions: dict[str, tuple[int | None, tuple[Node, ...]]] = {}
        """Bodies that a function may have, and the line of the condition on which that depends."""
        self._exports_all = False

    def _assign(self, name: str, value: str | list[str], line: int, *, append: bool = False) -> None:
        super()._assign(name, value, line, append=append)
        if self._exports_all:
            self._exported.add(name)

    def _define(self, name: str, body: Node) -> None:
        """Remember a function."""
        if name in _NO_FUNCTIONS:
            why = "since the word has a meaning of its own: give it another name"
            raise ConfigurationError(f"line {body.line}: a function {name} is not followed, {why}")
        _, others = self._functions.get(name, (None, ())) if self._uncertain is not None else (None, ())
        self._functions[name] = self._uncertain, (*others, body)

    def _run_declaration_command(self, node: Node) -> bool:
        """Follow `export`, `local`, `declare` and their like. Raises ConfigurationError for an unknown option."""
        keyword, *words = node.parts
        fields = [field for word in words if word.kind != "variable_assignment" for field in self._fields(word)]
        given = [field for field in fields if field[:1] not in "-+"]
        names = [field.partition("=")[0] for field in given]
        plain = [name for name in given if "=" not in name]
        assigned = [word for word in words if word.kind == "variable_assignment"]
        names += [word.parts[0].text for word in assigned]
        for letters in (field[1:] for field in fields if field[:1] in "-+"):
            if set(letters) - set(_DECLARATION_OPTIONS.get(keyword.kind, _DECLARE_OPTIONS)):
                raise ConfigurationError(f"line {node.line}: {keyword.kind} -{letters} is not followed: leave it out")
            if "n" in letters and keyword.kind != "export":
                raise ConfigurationError(f"line {node.line}: {keyword.kind} -n is not followed: write the name itself")
            if set(letters) & set("iluA"):
                self._peculiar |= dict.fromkeys(names, node.line)
        options = "".join(field for field in fields if field.startswith("-"))
        locked = dict.fromkeys(names if keyword.kind == "readonly" or "r" in options else (), node.line)
        self._peculiar |= locked if len(locked) < len(names) else {}  # one that stands there twice is read-only at once
        values, kept = dict[str, str](), dict(self._variables)
        for word in assigned:  # all are expanded before one is assigned
            values |= self._assign_word(word, lasting=False)
        if keyword.kind == "local" and not self._locals:
            raise ConfigurationError(f"line {node.line}: local is not followed outside of a function: leave it out")
        if self._locals and keyword.kind in ("local", "declare", "typeset") and "g" not in options:
            for name in (each for each in names if each not in self._locals[-1]):
                unsure = None if self._uncertain is None else self._unknown(f"${name}", node.line, name)
                self._locals[-1][name] = unsure or kept.get(name)
                if name in plain:
                    self._forget(name, node.line)
        for field in given:
            name, equals, value = field.partition("=")
            if any(not unknown.unset for unknown in self.unknowns(name)):
                self._skip(f"{keyword.text} {field}", node.line, harmless=False)
            elif not name.isidentifier():
                self._change(field, node.line)
            elif equals:
                values[name] = value
        for name, value in values.items():
            self._assign(name, value, node.line)
        self._peculiar |= locked
        if keyword.kind == "export" or any(re.match("-[a-z]*x", field) for field in fields):
            self._exported |= set(names)
        return True

    def _run_unset_command(self, node: Node) -> bool | None:
        for name in (field for word in node.parts[1:] for field in self._fields(word) if not field.startswith("-")):
            if name in self._functions:
                raise ConfigurationError(f"line {node.line}: unset {name} is not followed, since {name} is a function")
            if name.isidentifier():
                self._forget(name, node.line)
            else:
                self._change(name, node.line)
        return None

    def _forget(self, name: str, line: int) -> None:
        """Take a variable as not set."""
        self._assign(name, "", line)
        if name not in self._given and name not in self._peculiar and self._uncertain is None:
            del self._variables[name]

    def _assign_word(self, node: Node, *, lasting: bool) -> dict[str, str]:
        """Assign a variable. Returns its new value, or nothing if it is not only a text."""
        target, operator, *values = node.parts
        name, append = target.text.partition("[")[0], operator.kind == "+="
        if values and values[0].kind == "array":
            elements = [field for element in values[0].parts[1:-1] for field in self._fields(element)]
            if any(_SUBSCRIPT.match(element.text) for element in values[0].parts):
                self._change(name, node.line)
            else:
                self._assign(name, elements, node.line, append=append)
        elif target.kind == "subscript":
            self._arithmetic(target.text, target.parts[2:-1], node.line)  # it may assign, as the value may
            for value in values:
                self._text(value)
            self._change(name, node.line)
        else:
            text = "".join(map(self._text, values))
            before = self._variables.get(name, "")
            first_element = before if isinstance(before, str) else "".join(before[:1])
            text = first_element + text if append else text
            if lasting:
                self._assign(name, text if isinstance(before, str) else [text, *before[1:]], node.line)
            return {name: text}
        return {}

    def _set(self, fields: Sequence[str], line: int) -> bool | None:
        """Follow `set`, which changes options of the shell or the arguments."""
        at = 0
        while fields[at : at + 1] and re.fullmatch(r"[-+][aeuxvhmbCETfo]+", fields[at]):
            names = fields[at + 1 : at + 1 + fields[at].count("o")]
            if not _SET_OPTIONS.issuperset(names):
                words = self.shown(" ".join(fields))[:80]
                raise ConfigurationError(f"line {line}: set {words} is not followed: leave it out")
            if "a" in fields[at] or "allexport" in names:
                self._exports_all = fields[at].startswith("-")
            at += 1 + len(names)
        more = list(fields[at:])
        if not more:
            return True
        if more[0] != "--":
            raise ConfigurationError(f"line {line}: set {' '.join(more)[:80]} is not followed: write set -- ARGUMENTS")
        if self._uncertain is not None or any(map(self.unknowns, more)):
            self._moved = line
            return None
        self._variables = {name: value for name, value in self._variables.items() if not name.isdecimal()}
        self._variables |= {str(number): value for number, value in enumerate(more[1:], 1)}
        self._shifted, self._moved = 0, None
        return True

    def _shift(self, fields: Sequence[str], line: int) -> bool | None:
        """Follow `shift`, which does nothing if there are fewer arguments."""
        count = "".join(fields[:1]) or "1"
        there = str(self._look_up("#"))
        if self._uncertain is not None or not re.fullmatch(r"\d{1,6}", count, re.ASCII) or not there.isdecimal():
            self._moved = line
        elif int(count) <= int(there):
            self._shifted += int(count)
            return True
        return None

    def _skip(self, text: str, line: int, *, harmless: bool) -> None:
        """Note that commands are not read. All variables are unknown behind them, unless they are harmless."""
        self.notes.append(f"line {line}: {self.shown(text)} is not read; --set gives what it sets")
        if not harmless:
            self._sourced = True
            self._change(" ".join(name for name in self._variables if name.isidentifier()), line)

    def _refuse(self, fields: Sequence[str], line: int) -> None:
        """Refuse commands that change how bash reads or runs the others."""
        name, *words = fields
        inner = name in ("time", "command", "builtin") and words[:1]
        if (
            (name == "shopt" and re.search("(^| )-[a-z]*[su]", " ".join(words)) and not _OPTIONS.issuperset(words))
            or (name == "alias" and words)
            or (name == "trap" and not {"DEBUG", "ERR", "RETURN"}.isdisjoint(words) and "=" in words[0])
            or (inner and (inner[0] in self._functions or inner[0] in _BUILTINS))
        ):
            raise ConfigurationError(f"line {line}: {self.shown(' '.join(fields))[:80]} is not followed: leave it out")

    def _refuse_first_line(self, text: str, line: int) -> None:
        if found := _OF_NO_COMMANDS.match(text):
            raise ConfigurationError(f"line {line}: {found[0][:80]} is not followed: leave the option out")

    def _refuse_hidden_assignments(self, tree: Node) -> None:
        """Refuse arithmetic that assigns within ${...}: whether bash comes to it depends on what is set."""
        nodes = [tree]
        while nodes:
            node = nodes.pop()
            if node.kind == "expansion" and _HIDDEN_ASSIGNMENT.search(node.text):
                raise ConfigurationError(f"line {node.line}: {node.text[:80]} is not followed: assign before it")
            nodes += node.parts

    def _refuse_options(self, fields: Sequence[str], line: int) -> None:
        """Refuse options of a shell that change how it reads or runs commands."""
        for field in fields:
            if not _SHELL_OPTION.fullmatch(field) and field not in _SET_OPTIONS - {"allexport"}:
                option = self.shown(field)[:80]
                raise ConfigurationError(f"line {line}: a shell with {option} is not followed: leave it out")

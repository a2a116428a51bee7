"""Expansion of the words of shell scripts: what variables, arithmetic and quotes make of them.

What only a shell, or this machine, could tell (the output of a command, a variable that nothing sets) becomes an
`Unknown`. It stays within the words that it reaches, as a number between two marks.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from glob import escape
from typing import Any

from megalite.errors import ConfigurationError
from megalite.extras.translation.shell_syntax import PLACEHOLDER, Node, visible
from megalite.small_files import MIB

LARGEST = MIB // 4
"""Largest size of a script, and of a value in it, in characters."""
_MOST_WORK = 4 * MIB
"""Limit for the number of characters that all expansions of a script give together."""
MARK = re.compile("\ue000(\\d+)\ue001")
_PARAMETER = re.compile(r"(#?)(\w+|[@*#?$!-])(?:\[([^]]*)\])?(?:(:?[-=+?])(.*))?", re.ASCII | re.DOTALL)
_ASSIGNS = re.compile(r"(?<![=!<>])=(?!=)|<<=|>>=|\+\+|--")
"""Pattern of what changes a variable within an arithmetic expression."""
_FINE = re.compile(
    r"(^|[(,?])(?:\s*[A-Za-z_]\w*\s*(?:\[[^]]*\]\s*)?(?:<<|>>|[-+*/%&|^])?=(?!=))+"
    r"|(?:\+\+|--)\s*[A-Za-z_]\w*|[A-Za-z_]\w*(?:\[[^]]*\])?\s*(?:\+\+|--)(?!\s*\d)",
    re.ASCII,
)
"""Assignments that bash takes."""
_NO_NUMBER = re.compile(r"(?<!#)\b(?!\d+#|0[xX][\da-fA-F]*\b|0[0-7]*\b|[1-9]\d*\b)\d|[.']|\*\*[\s(]*-", re.ASCII)
_DIVISOR = re.compile(r"(?:[/%]=?|\*\*)[-+!~(\s]*(\w+)", re.ASCII)
_ALL = re.compile(r'"\$(@|\{@\}|\{\w+\[@\]\})"', re.ASCII)
"""Word that is no word, not even an empty one, if it has no elements."""
_QUOTED = re.compile(r"\$\{.*[-+=].*['\"\\]", re.DOTALL)
_OF_ELEMENTS = re.compile(r"\$\{(.*@.*[-+=]|.*[-+=].*@)", re.DOTALL)
"""Expansions that are divided in a part of them alone, without quotes and within them."""
_NO_GLOB = re.compile(r"'[^']*'|\"[^\"]*\"|\\.|\$\{[^}]*\}|\$\(.*\)|`.*`|\$[*?]", re.DOTALL)
_BRACES = re.compile(r"\{([^{}\s]*)\}")
_SHELL = ("command_substitution", "process_substitution", "ansi_c_string", "translated_string")
_EXPANDS = re.compile(r"\$[A-Za-z_]\w*|\$\{[^}]*\}|\$\((?!\().*\)|`.*`", re.ASCII)
_OF_BASH = re.compile(
    r"[?$!_-]|BASH.*|DIRSTACK|EPOCH.*|E?UID|FUNCNAME|GROUPS|HISTCMD|HOST(NAME|TYPE)|IFS|LINENO|(MACH|OS)TYPE|(OLD)?PWD"
    r"|OPT(ERR|IND)|PATH|PIPESTATUS|PPID|PS4|S?RANDOM|SECONDS|SHELLOPTS|SHLVL|TERM|COMP_WORDBREAKS"
)
"""Variables that bash itself sets."""
_NOT_PYTHONS = re.compile(r"\\|\[[\^:.=]|\[[^]]*\[[:.=]|[?*+@!]\(")
"""Characters of a pattern that have another meaning in Python."""
_NAME = re.compile(r"\$\{?[#!]?(\w+|[@*#?$!-])", re.ASCII)
_BLANKS, _WORD = (" ", "\t", "\n"), re.compile(r"[^ \t\n]+")  # to Python, there is more white space
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
}
"""Operations of arithmetic expressions. Shells round towards zero."""


@dataclass
class Unknown:
    """Value that only a shell can tell: its text in the script, and the variable that could be given for it.

    Attributes:
        expands: whether any shell would expand the text, since it is whole and needs nothing that the script sets.
        divides: whether it may be several words, or none.
    """

    text: str
    line: int
    name: str | None = None
    unset: bool = False
    expands: bool = False
    divides: bool = False


class Expansion:
    """Variables of a script that is read, and what words become with them.

    Attributes:
        notes: lines about what was assumed.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.notes: list[str] = []
        self._given = dict(variables)
        self._variables: dict[str, str | list[str]] = dict(variables)
        self._unknowns: list[Unknown] = []
        self._uncertain: int | None = None
        self._shifted, self._sourced, self._work = 0, False, 0
        self._moved: int | None = None  # line that may have changed the arguments
        self._peculiar: dict[str, int] = {}
        """Variables with an attribute that changes what is assigned (`declare -i`, `readonly`), and its line."""
        self._guesses = 0
        """Number of variables in conditions that were taken as empty."""

    def unknowns(self, text: str) -> list[Unknown]:
        """Return what is not known in a word."""
        return [self._unknowns[int(number)] for number in MARK.findall(text)]

    def shown(self, text: str) -> str:
        """Return a word with the script's own text in place of what is not known."""
        return MARK.sub(lambda found: self._unknowns[int(found[1])].text, text)

    def for_a_shell(self, text: str) -> str:
        """Return a word with what a shell is to expand between two marks."""
        return MARK.sub(lambda found: f"\ue000{self._unknowns[int(found[1])].text}\ue001", text)

    def _unknown(self, text: str, line: int, name: str | None = None, *, unset: bool = False) -> str:
        whole = visible(self.shown(text))
        short = " ".join(whole.split())[:80]
        names = _NAME.findall(re.sub("'[^']*'", "", whole))
        known = any(not each.isidentifier() or each in self._variables for each in names)
        expands = short == whole and _EXPANDS.fullmatch(whole) is not None and not known and not MARK.search(text)
        return self._mark(Unknown(short, line, name, unset, expands))

    def _mark(self, unknown: Unknown) -> str:
        self._unknowns.append(unknown)
        return f"\ue000{len(self._unknowns) - 1}\ue001"

    def _divided(self, text: str) -> str:
        """Return a text whose unknown values may be several words."""
        return MARK.sub(lambda found: self._mark(replace(self._unknowns[int(found[1])], divides=True)), text)

    def _assign(self, name: str, value: str | list[str], line: int, *, append: bool = False) -> None:
        """Set a variable, unless the user has given it. What depends on an undecided branch becomes unknown."""
        if name in self._given:
            return
        if name == "IFS":
            raise ConfigurationError(f"line {line}: IFS is not followed: divide the words at white space")
        depends = self._peculiar.get(name) if self._uncertain is None else self._uncertain
        if depends is not None:
            text = f"${name}, which depends on line {depends}"
            unknown = self._unknown(text, line, name)
            value = [unknown] if isinstance(value, list) else unknown
        if append and isinstance(value, list):
            before = self._variables.get(name, [])
            value = [*(before if isinstance(before, list) else [before]), *value]
        if isinstance(value, str):
            whole = MARK.fullmatch(value) is not None
            for each in self.unknowns(value):  # it can be given by this name, too
                if (each.name is None and "--" not in value) or (each.unset and whole):
                    each.name = name
        self._variables[name] = value
        self._charge(value)

    def _change(self, text: str, line: int) -> None:
        """Treat all variables that a text names as unknown."""
        kept = self._uncertain
        self._uncertain = line if kept is None else kept
        for name in re.findall(r"\b[A-Za-z_]\w*", text, re.ASCII):
            self._assign(name, "", line)
        self._uncertain = kept

    def _charge(self, value: str | Sequence[str]) -> None:
        size = len(value) if isinstance(value, str) else sum(len(each) + 1 for each in value)
        self._work += size
        if size > LARGEST or self._work > _MOST_WORK:
            raise ConfigurationError("the values of the script's variables are too large to follow")

    def _text(self, node: Node, *, quoted: bool = False) -> str:
        """Return what a word becomes that is not divided."""
        return "".join(" ".join(values) for values, _ in self._pieces(node, quoted))

    def _pattern(self, node: Node) -> str:
        """Return what a word becomes as a pattern, where nothing in quotes has a meaning."""
        if node.kind == "concatenation":
            return "".join(map(self._pattern, node.parts))
        text = self._text(node)
        if node.kind in ("string", "raw_string"):
            return escape(text)
        return self._unknown(node.text, node.line) if _NOT_PYTHONS.search(node.text + "\n" + text) else text

    def _fields(self, node: Node) -> list[str]:
        """Return the words that a word becomes when its variables are replaced."""
        fields, current, none = list[str](), None, False
        for values, whole in self._pieces(node, False):
            if whole is None and any(_WORD.findall(value) != [value] for value in values):
                values, whole = [self._divided(self._unknown(node.text, node.line))], True
            none = none or not values
            if whole and len(values) == 1:
                current = (current or "") + values[0]
                continue
            pieces, text = values, ""
            if not whole:
                text = self._divided("\0".join(values))  # the elements of an array stay apart
                pieces = [each for value in text.split("\0") for each in _WORD.findall(value)]
                if re.search(r"[*?]", text):
                    pieces = [self._divided(self._unknown(node.text, node.line))]
                if text.startswith(_BLANKS) and current is not None:
                    fields.append(current)
                    current = None
            if pieces:
                fields += [(current or "") + pieces[0], *pieces[1:]]
                current = fields.pop()
                if text.endswith(_BLANKS):
                    fields.append(current)
                    current = None
        if current is not None and not (none and _ALL.fullmatch(node.text)):
            fields.append(current)
        if re.search(r"[*?]", _NO_GLOB.sub("", node.text)):  # which stands for files, if there are any
            fields = [self._divided(self._unknown(node.text, node.line))]
        self._charge(fields)
        return fields

    def _pieces(self, node: Node, quoted: bool) -> Iterator[tuple[list[str], bool | None]]:
        """Yield what the parts of a word become, one text or several for an array, and whether each stays whole.

        None: a part of it does.
        """
        if not quoted and node.kind in ("word", "concatenation", "brace_expression"):
            bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", node.text)
            if any("," in each or ".." in each for each in _BRACES.findall(bare)):
                yield [self._divided(self._unknown(node.text, node.line))], True
                return
        if node.kind in ("simple_expansion", "expansion"):
            values = self._parameter(node, quoted)
            if (_OF_ELEMENTS if quoted else _QUOTED).match(node.text):
                yield (values or [""]) if quoted else values, None
            else:
                yield values, quoted
        elif node.kind == "arithmetic_expansion":
            yield [self._arithmetic(node.text, node.parts[1:-1], node.line)], True
        elif node.kind in _SHELL:
            yield [self._unknown(node.text, node.line)], quoted or node.kind != "command_substitution"
        elif node.kind == "raw_string" and not quoted:
            yield [self._plain(node.text[1:-1], None, node.line)], True
        elif node.kind == "string":
            yield [""], True
            for part in node.parts[1:-1]:
                yield from self._pieces(part, True)
        elif node.parts:
            for part in node.parts:
                yield from self._pieces(part, quoted)
        else:
            text = node.text
            if not quoted and re.match("~(/|$)", text) and node.source[node.begin - 1 : node.begin] in b" \t\n=(":
                yield [str(self._look_up("HOME") or self._unset("HOME", node.line))], True
                text = text[1:]
            yield [self._plain(text, quoted, node.line)], True

    def _plain(self, text: str, quoted: bool | None, line: int) -> str:
        """Return a text without its backslashes, and with unknown values for its placeholders."""
        if quoted is not None:
            letters = '[$`"\\\\\n]' if quoted else "."
            text = re.sub(rf"\\({letters})", lambda found: found[1].strip("\n"), text, flags=re.DOTALL)

        def replaced(found: re.Match[str]) -> str:
            name = visible(found[0])
            return name if quoted is not False and " " not in name else self._unknown(name, line)

        return PLACEHOLDER.sub(replaced, text)

    def _parameter(self, node: Node, quoted: bool) -> list[str]:
        """Return the words of `$name` or `${name...}`; a change that is not followed gives an unknown one."""
        line, text = node.line, node.text
        found = _PARAMETER.fullmatch(text[2:-1] if text.startswith("${") else text[1:])
        if found is None:
            return [self._unknown(node.text, line)]
        length, name, index, change = found.groups()[:4]
        place = "0"
        for subscript in (part for part in node.parts if part.kind == "subscript"):  # it may assign, whatever it is of
            place = self._arithmetic(subscript.text, subscript.parts[2:-1], line)
        value = self._look_up(name)
        if length:
            if isinstance(value, list) and index in ("@", "*"):
                return [str(len(value)) if not any(map(self.unknowns, value)) else self._unknown(node.text, line)]
            plain = isinstance(value, str) and not self.unknowns(value)
            return [str(len(value or "")) if plain else self._unknown(node.text, line)]
        if index in ("@", "*") and isinstance(value, str) and name in self._given:
            value = value.split()
        if isinstance(value, list) and name not in "@*":
            value = value if index in ("@", "*") else self._element(value, place, node)
        elif index not in (None, "@", "*", "0"):
            return [self._unknown(node.text, line)]
        if change is not None:
            value = None if value == [] else value
            if value is None and (self._sourced or _OF_BASH.fullmatch(name)):
                return [self._unset(name, line)]
            joined = "".join(value or "")
            if change[-1] == "+" and self.unknowns(joined) and not MARK.sub("", joined):
                return [self._unknown(node.text, line)]
            empty = value is None or (change.startswith(":") and value in ("", [], [""]))
            if change[-1] == "+" and empty:
                return []
            if change[-1] == "+" or (empty and change[-1] in "-="):
                at = [part.kind for part in node.parts].index(change)
                operand = node.parts[at + 1 : -1]
                pieces = [values for part in operand for values, _ in self._pieces(part, quoted)]
                value = "".join(map(" ".join, pieces))
                if change[-1] != "=" and len(operand) == 1 and _ALL.fullmatch(operand[0].text):
                    return pieces[-1]
                if change[-1] == "=" and not name.isidentifier():
                    raise ConfigurationError(f"line {line}: {node.text} is not followed: bash cannot assign to {name}")
                if change[-1] == "=" and index is None:
                    self._assign(name, value, line)
                elif change[-1] == "=":
                    self._change(name, line)
            elif empty:
                value = None
        if value is None:
            return [self._unset(name, line)]
        if isinstance(value, str):
            return [value]
        return [" ".join(value)] if (index == "*" or name == "*") and quoted else value

    def _unset(self, name: str, line: int) -> str:
        known = name if name[0].isalnum() or name[0] == "_" else None
        return self._unknown(f"${name}", line, known, unset=not (self._sourced or _OF_BASH.fullmatch(name)))

    def _look_up(self, name: str) -> str | list[str] | None:
        """Return the value of a variable, or of an argument of the script; None if it is not set."""
        if name == "0":
            return "script"
        if self._moved is not None and (name.isdecimal() or name in ("@", "*", "#")):
            return self._unknown(f"${name}, which depends on line {self._moved}", self._moved)
        if name.isdecimal():
            place = int(name[:6]) + self._shifted
            before = [str(self._variables[each]) for each in self._variables if each.isdecimal() and int(each) < place]
            self._charge(before)
            for unknown in self.unknowns("".join(before)):
                if unknown.divides:
                    return self._unknown(f"${name}, which depends on {unknown.text}", unknown.line)
            return self._variables.get(str(place))
        if name in ("@", "*", "#"):
            numbers = sorted(int(each) for each in self._variables if each.isdecimal())
            values = [str(self._variables[str(number)]) for number in numbers if number > self._shifted]
            if name == "#":
                return str(len(values)) if not any(map(self.unknowns, values)) else self._unknown("$#", 0)
            return values
        return self._variables.get(name)

    def _element(self, values: list[str], index: str, node: Node) -> str | None:
        if any(map(self.unknowns, values)) or not index.isdecimal() or len(index) > 6:
            return self._unknown(node.text, node.line)
        return values[int(index)] if int(index) < len(values) else None

    def _arithmetic(self, text: str, nodes: Sequence[Node], line: int) -> str:
        """Return the value of an arithmetic expression of whole numbers."""
        expanded = " ".join(" ".join(values) for node in nodes for values, _ in self._pieces(node, True))
        plain = re.fullmatch(r"[\w\s()+*/%-]{1,200}", expanded, re.ASCII)
        # Powers, and some numbers, are not what they are in Python.
        if not (assigns := _ASSIGNS.search(expanded)) and plain and not re.search(r"\*\*|\d_|\b0[bBoO]", expanded):
            with suppress(SyntaxError, ValueError, RecursionError, MemoryError, ArithmeticError):
                value = self._number(ast.parse(expanded.strip().replace("/", "//"), mode="eval").body)
                if -(2**63) <= value < 2**63:
                    return str(value)
        if text.partition("[")[0] not in self._peculiar and not self._is_sound(expanded):  # a key may be any text
            raise ConfigurationError(f"line {line}: {text[:80]} is not followed: bash may fail to calculate it")
        self._change(expanded if assigns else "", line)
        return self._unknown(text, line)

    def _is_sound(self, text: str) -> bool:
        """Tell whether bash calculates an expression without an error, with no variable 0 that nothing sets."""
        names = {*re.findall(r"\b[A-Za-z_]\w*", text, re.ASCII)} & self._variables.keys()
        values = {name: [v] if isinstance(v := self._variables[name], str) else v for name in names}
        for value in (each for elements in values.values() for each in elements):
            number = re.fullmatch(r"\s*[-+]?(0[0-7]*|[1-9]\d{0,17})?\s*", value, re.ASCII)
            if not number and not MARK.search(value) and (not value.isidentifier() or value in self._variables):
                return False
        divisors = ["".join(values.get(each, [each.strip("0") and "1"])[:1]) for each in _DIVISOR.findall(text)]
        zero = any(re.fullmatch(r"0*|-.*|[A-Za-z_].*", divisor) for divisor in divisors)
        return not (zero or _NO_NUMBER.search(text) or _ASSIGNS.search(_FINE.sub(r"\1", text)))

    def _number(self, node: Any) -> int:
        """Return the value of a node of an expression, as shells calculate it. Raises ValueError for anything else."""
        match node:
            case ast.Constant(value=value) if type(value) is int:
                return value
            case ast.Name(id=name) if re.fullmatch(r"-?(0|[1-9]\d{0,17})", str(self._variables.get(name, ""))):
                return int(str(self._variables[name]))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand)
            case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
                a, b = self._number(left), self._number(right)
                if max(abs(a), abs(b)) < 2**63:
                    return _OPERATIONS[type(operation)](a, b)
        raise ValueError

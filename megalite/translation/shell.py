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
from glob import escape
from pathlib import PurePath
from typing import Any

from megalite.errors import ConfigurationError
from megalite.small_files import MIB
from megalite.translation.shell_syntax import PLACEHOLDER, Node, parse, visible

LARGEST = MIB // 4
"""Largest size of a script, and of a value in it, in characters."""
_MOST_WORK = 4 * MIB
"""Limit for the number of characters that all expansions of a script give together."""
_MOST_STEPS, _MOST_CALLS, _MOST_TOKENS = 20_000, 20, 200
_MARK = re.compile("\ue000(\\d+)\ue001")
_PARAMETER = re.compile(r"(#?)(\w+|[@*#?$!-])(?:\[([^]]*)\])?(?:(:?[-=+?])(.*))?", re.ASCII | re.DOTALL)
_BRACES = re.compile(r"\{([^{}\s]*)\}")
_SUCCEED = ("cd", "mkdir", "echo", "set", "module", "date", "pushd", "popd", "printf", ":", "true", "shift", "ulimit")
_CHANGING = ("read", "mapfile", "readarray", "getopts", "let")
_SHELL = ("command_substitution", "process_substitution", "ansi_c_string", "translated_string")
_BODIES = ("word", "compound_statement", "subshell", "test_command", "if_statement")
_QUOTE = re.compile(r"['\"\\]")
_EXPANDS = re.compile(r"\$[A-Za-z_]\w*|\$\{[^}]*\}|\$\((?!\().*\)|`.*`", re.ASCII)
_NAME = re.compile(r"\$\{?[#!]?(\w+|[@*#?$!-])", re.ASCII)
_OF_NO_RUN = re.compile(
    r"(.*/)?(activate|\.?bashrc|\.?(bash_)?profile|(conda|setvars|modules?)\.sh)|/etc/.*", re.DOTALL
)
"""Files that scripts source for their programs, and not for settings of a run."""


@dataclass
class Unknown:
    """Value that only a shell can tell: its text in the script, and the variable that could be given for it.

    Attributes:
        expands: whether any shell would expand the text, since it is whole and needs nothing that the script sets.
    """

    text: str
    line: int
    name: str | None = None
    unset: bool = False
    expands: bool = False


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
        self._functions: dict[str, Node] = {}
        self._locals: list[set[str]] = []
        self._unknowns: list[Unknown] = []
        self._before: tuple[str, ...] = ()
        self._uncertain: int | None = None
        self._shifted, self._sourced = 0, False
        self._steps, self._work, self._calls = 0, 0, 0

    def read(self, text: str, line: int | None = None) -> None:
        """Follow the commands of a text.

        Args:
            line: number for all lines, if the text was a word in this line of another script.

        Raises:
            ConfigurationError: it is not a shell script, or is larger than a limit.
        """
        if len(text) > LARGEST:
            raise ConfigurationError(f"more than {LARGEST:,} characters: too large for a launch script")
        self.headers += [w for header in re.findall(r"^#SBATCH\s(.*)", text, re.MULTILINE) for w in header.split()]
        self._run(parse(text, line).parts)

    def unknowns(self, text: str) -> list[Unknown]:
        """Return what is not known in a word."""
        return [self._unknowns[int(number)] for number in _MARK.findall(text)]

    def shown(self, text: str) -> str:
        """Return a word with the script's own text in place of what is not known."""
        return _MARK.sub(lambda found: self._unknowns[int(found[1])].text, text)

    def for_a_shell(self, text: str) -> str:
        """Return a word with what a shell is to expand between two marks."""
        return _MARK.sub(lambda found: f"\ue000{self._unknowns[int(found[1])].text}\ue001", text)

    def _unknown(self, text: str, line: int, name: str | None = None, *, unset: bool = False) -> str:
        whole = visible(self.shown(text))
        short = " ".join(whole.split())[:80]
        names = _NAME.findall(re.sub("'[^']*'", "", whole))
        known = any(not each.isidentifier() or each in self._variables for each in names)
        expands = short == whole and _EXPANDS.fullmatch(whole) is not None and not known and not _MARK.search(text)
        self._unknowns.append(Unknown(short, line, name, unset, expands))
        return f"\ue000{len(self._unknowns) - 1}\ue001"

    # ------------------------------------------------------------------------------------------------ commands

    def _run(self, nodes: Sequence[Node]) -> bool | None:
        """Follow commands. Returns whether the last one succeeds; None: only a shell can tell."""
        status: bool | None = True
        for node in nodes:
            if (run := getattr(self, f"_run_{node.kind}", None)) is not None:
                self._steps += 1
                if self._steps > _MOST_STEPS:
                    raise ConfigurationError(f"the script runs more than {_MOST_STEPS:,} commands: too many to follow")
                status = run(node)
        return status

    @contextmanager
    def _depending_on(self, line: int | None) -> Iterator[None]:
        """Treat what is assigned in the block as unknown if a condition in this line cannot be decided."""
        before = self._uncertain
        self._uncertain = line if before is None else before
        yield
        self._uncertain = before

    def _run_all(self, node: Node) -> bool | None:
        return self._run(node.parts)

    _run_program = _run_pipeline = _run_do_group = _run_heredoc_redirect = _run_variable_assignments = _run_all

    def _run_compound_statement(self, node: Node) -> bool | None:
        if node.parts[0].kind == "{":
            return self._run(node.parts)
        self._change(node.text, node.line)
        return None

    def _run_subshell(self, node: Node) -> bool | None:
        outer = dict(self._variables)
        status = self._run(node.parts)
        self._variables = outer
        return status

    def _run_list(self, node: Node) -> bool | None:
        left, joint, *_, right = node.parts
        status = self._run([left])
        if status is None or status == (joint.kind == "&&"):
            with self._depending_on(right.line if status is None else None):
                found = self._run([right])
            return None if status is None else found
        return status

    def _run_negated_command(self, node: Node) -> bool | None:
        status = self._run(node.parts)
        return None if status is None else not status

    def _run_if_statement(self, node: Node) -> bool | None:
        decided = True
        for branch in [node, *(part for part in node.parts if part.kind in ("elif_clause", "else_clause"))]:
            then = [part.kind for part in branch.parts].index("then") if branch.kind != "else_clause" else 0
            holds = self._run(branch.parts[1:then]) if then else True
            if holds is False:
                continue
            decided = decided and holds is True
            with self._depending_on(None if decided else node.line):
                status = self._run(branch.parts[then + 1 :])
            if decided:
                return status
            if holds:
                break
        return True if decided else None

    def _run_case_statement(self, node: Node) -> bool | None:
        value = self._known(node.parts[1])
        for item in (part for part in node.parts if part.kind == "case_item"):
            end = [part.kind for part in item.parts].index(")")
            texts = [self._pattern(part) for part in item.parts[:end] if part.kind not in "|("]
            if value is None or any(fnmatchcase(value, text) for text in texts):
                with self._depending_on(node.line if value is None else None):
                    self._run(item.parts[end:])
                if value is not None:
                    break
        return None

    def _run_for_statement(self, node: Node) -> None:
        *header, body = node.parts
        commands, notes = len(self.commands), len(self.notes)
        for _ in range(2):  # the second time, it is known what the loop changes
            del self.commands[commands:], self.notes[notes:]
            with self._depending_on(node.line):
                if node.kind != "while_statement":
                    changed = header[1:2] if node.kind == "for_statement" else header
                    self._change(" ".join(part.text for part in changed), node.line)
                self._run([body])

    _run_c_style_for_statement = _run_for_statement

    def _run_while_statement(self, node: Node) -> bool | None:
        if node.parts[0].kind == "while" and self._run(node.parts[1:-1]) is False:
            return True
        self._run_for_statement(node)
        return None

    def _run_function_definition(self, node: Node) -> bool:
        name, *_, body = (part for part in node.parts if part.kind in _BODIES)
        self._functions[name.text] = body
        return True

    def _run_variable_assignment(self, node: Node) -> bool:
        self._assign_word(node, lasting=True)
        return True

    def _run_test_command(self, node: Node) -> bool | None:
        if node.parts[0].kind == "((":
            return self._run_compound_statement(node)
        return self._test([*_operands(node.parts[1:-1])], pattern=node.parts[0].kind == "[[")

    def _run_declaration_command(self, node: Node) -> bool:
        keyword, *words = node.parts
        fields = [field for word in words if word.kind != "variable_assignment" for field in self._fields(word)]
        names = [field.partition("=")[0] for field in fields if not field.startswith("-")]
        assigned = [word for word in words if word.kind == "variable_assignment"]
        names += [word.parts[0].text for word in assigned]
        if self._locals and keyword.kind in ("local", "declare", "typeset"):
            self._locals[-1] |= set(names)
        self._run(assigned)
        if keyword.kind == "export" or any(re.match("-[a-z]*x", field) for field in fields):
            self._exported |= set(names)
        return True

    def _run_unset_command(self, node: Node) -> bool | None:
        for name in (part.text for part in node.parts[1:] if part.kind == "variable_name"):
            self._assign(name, "", node.line)
            if name not in self._given and self._uncertain is None:
                del self._variables[name]
        return None

    def _run_redirected_statement(self, node: Node) -> bool | None:
        body, *redirections = node.parts
        documents = [each for each in redirections if each.kind == "heredoc_redirect"]
        if body.kind == "command":
            more = [word for each in redirections if each.kind == "file_redirect" for word in _behind(each)]
            status = self._run_command(body, more, documents)
        else:
            status = self._run([body])
        self._run(documents)
        return status

    def _change(self, text: str, line: int) -> None:
        """Treat all variables that a text names as unknown."""
        with self._depending_on(line):
            for name in re.findall(r"\b[A-Za-z_]\w*", text, re.ASCII):
                self._assign(name, "", line)

    def _run_command(self, node: Node, more: Sequence[Node] = (), documents: Sequence[Node] = ()) -> bool | None:
        line = node.line
        own: dict[str, str] = {}
        words = list[Node]()
        for part in node.parts:
            if part.kind == "variable_assignment":
                own |= self._assign_word(part, lasting=False)
            elif part.kind == "file_redirect":
                words += _behind(part)
            elif part.kind != "herestring_redirect":
                words.append(part)
        words += more
        fields = [field for word in words for field in self._fields(word)]
        if not fields:
            return True
        name = fields[0]
        if name in _CHANGING or fields[:2] == ["printf", "-v"]:
            self._change(" ".join(fields[1:]), line)
        elif name == "test":
            return self._test(words[1:], pattern=False)
        elif name == "false":
            return False
        elif name == "shift":
            self._shifted += int(fields[1]) if fields[1:] and fields[1].isdecimal() and len(fields[1]) < 4 else 1
        elif name in (".", "source"):
            self.notes.append(f"line {line}: {self.shown(' '.join(fields[:2]))} is not read; --set gives what it sets")
            if not _OF_NO_RUN.fullmatch("".join(fields[1:2])):
                self._sourced = True
                self._change(" ".join(name for name in self._variables if name.isidentifier()), line)
        elif name in self._functions and self._calls < _MOST_CALLS:
            return self._call(self._functions[name], fields[1:])
        else:
            self._record(fields, own, documents, line)
        return True if name in _SUCCEED else None

    def _call(self, body: Node, arguments: Sequence[str]) -> bool | None:
        outer, shifted, self._shifted = dict(self._variables), self._shifted, 0
        self._variables = {name: value for name, value in outer.items() if not name.isdecimal()}
        self._variables |= {str(number): value for number, value in enumerate(arguments, 1)}
        self._calls += 1
        self._locals.append(set())
        status = self._run([body])
        own = self._locals.pop() | {name for name in {*self._variables, *outer} if name.isdecimal()}
        self._calls -= 1
        after = {name: value for name, value in self._variables.items() if name not in own}
        self._variables = after | {name: value for name, value in outer.items() if name in own}
        self._shifted = shifted
        return status

    def _record(self, fields: list[str], own: Mapping[str, str], documents: Sequence[Node], line: int) -> None:
        """Record a command; follow the script that it gives to a shell, if any."""
        environment = {n: v for n in sorted(self._exported) if isinstance(v := self._variables.get(n), str)} | dict(own)
        names = [PurePath(field).name for field in fields]
        shell = next((at for at, name in enumerate(names) if name in ("bash", "sh")), len(fields))
        option = next((at for at in range(shell, len(fields)) if re.fullmatch(r"-[a-z]*c", fields[at])), len(fields))
        if names[0] == "eval":
            self._within(" ".join(fields[1:]), line)
        elif option + 1 < len(fields):
            self._inner(fields[option + 1], environment, tuple(fields[:shell]), line)
        elif documents and (names[0] == "sbatch" or shell < len(fields)):
            for document in documents:
                parts = {part.kind: part for part in document.parts}
                text = parts["heredoc_body"].text if "heredoc_body" in parts else ""
                if not _QUOTE.search(parts["heredoc_start"].text):  # a shell expands variables in it
                    text = self._text(parts["heredoc_body"], quoted=True) if text else ""
                self._inner(visible(text), environment, tuple(fields[:shell]), line)
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
        self.read(text, line)
        self._calls -= 1

    # ------------------------------------------------------------------------------------------------ variables

    def _assign_word(self, node: Node, *, lasting: bool) -> dict[str, str]:
        """Assign a variable. Returns its new value, or nothing if it is not only a text."""
        target, operator, *values = node.parts
        name, append = target.text.partition("[")[0], operator.kind == "+="
        if values and values[0].kind == "array":
            elements = [field for element in values[0].parts[1:-1] for field in self._fields(element)]
            self._assign(name, elements, node.line, append=append)
        elif target.kind == "subscript":
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

    def _text(self, node: Node, *, quoted: bool = False) -> str:
        """Return what a word becomes that is not divided."""
        return "".join(" ".join(values) for values, _ in self._pieces(node, quoted))

    def _pattern(self, node: Node) -> str:
        """Return what a word becomes as a pattern, where nothing in quotes has a meaning."""
        if node.kind == "concatenation":
            return "".join(map(self._pattern, node.parts))
        return escape(self._text(node)) if node.kind in ("string", "raw_string") else self._text(node)

    def _fields(self, node: Node) -> list[str]:
        """Return the words that a word becomes when its variables are replaced."""
        fields, current = list[str](), None
        for values, whole in self._pieces(node, False):
            if whole and len(values) == 1:
                current = (current or "") + values[0]
                continue
            pieces, text = values, ""
            if not whole:
                text = "\0".join(values)  # the elements of an array stay apart
                pieces = [each for value in text.split("\0") for each in value.split()]
                if text[:1].isspace() and current is not None:
                    fields.append(current)
                    current = None
            if pieces:
                fields += [(current or "") + pieces[0], *pieces[1:]]
                current = fields.pop()
                if text[-1:].isspace():
                    fields.append(current)
                    current = None
        if current is not None:
            fields.append(current)
        self._charge(fields)
        return fields

    def _pieces(self, node: Node, quoted: bool) -> Iterator[tuple[list[str], bool]]:
        """Yield what the parts of a word become, one text or several for an array, and whether each stays whole."""
        if not quoted and node.kind in ("word", "concatenation", "brace_expression"):
            bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", node.text)
            if any("," in each or ".." in each for each in _BRACES.findall(bare)):
                yield [self._unknown(node.text, node.line)], True
                return
        if node.kind in ("simple_expansion", "expansion"):
            yield self._parameter(node, quoted), quoted
        elif node.kind == "arithmetic_expansion":
            yield [self._arithmetic(node.text, node.parts[1:-1], node.line)], quoted
        elif node.kind in _SHELL:
            yield [self._unknown(node.text, node.line)], True
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
        line, text = node.line, node.text
        found = _PARAMETER.fullmatch(text[2:-1] if text.startswith("${") else text[1:])
        if found is None:
            return [self._unknown(node.text, line)]
        length, name, index, operator = found.groups()[:4]
        value = self._look_up(name)
        if length:
            if isinstance(value, list) and index in ("@", "*"):
                return [str(len(value)) if not any(map(self.unknowns, value)) else self._unknown(node.text, line)]
            plain = isinstance(value, str) and not self.unknowns(value)
            return [str(len(value or "")) if plain else self._unknown(node.text, line)]
        if index in ("@", "*") and isinstance(value, str) and name in self._given:
            value = value.split()
        if isinstance(value, list) and name not in "@*":
            value = value if index in ("@", "*") else self._element(value, index or "0", node)
        elif index not in (None, "@", "*", "0"):
            return [self._unknown(node.text, line)]
        if operator is not None:
            if value is None and self._sourced:
                return [self._unset(name, line)]
            empty = value is None or (operator.startswith(":") and value in ("", [], [""]))
            if operator[-1] == "+" and empty:
                value = ""
            elif operator[-1] == "+" or (empty and operator[-1] in "-="):
                at = [part.kind for part in node.parts].index(operator)
                value = "".join(self._text(part, quoted=quoted) for part in node.parts[at + 1 : -1])
                if operator[-1] == "=":
                    self._assign(name, value, line)
            elif empty:
                value = None
        if value is None:
            return [self._unset(name, line)]
        if isinstance(value, str):
            return [value]
        joined = index == "*" or name == "*"
        return [" ".join(value)] if joined and quoted else value

    def _unset(self, name: str, line: int) -> str:
        known = name if name[0].isalnum() or name[0] == "_" else None
        return self._unknown(f"${name}", line, known, unset=not self._sourced)

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

    def _element(self, values: list[str], index: str, node: Node) -> str | None:
        if not index.isdecimal():
            subscript = next(part for part in node.parts if part.kind == "subscript")
            index = self._arithmetic(index, subscript.parts[2:-1], node.line)
        if any(map(self.unknowns, values)) or not index.isdecimal() or len(index) > 6:
            return self._unknown(node.text, node.line)
        return values[int(index)] if int(index) < len(values) else None

    def _arithmetic(self, text: str, nodes: Sequence[Node], line: int) -> str:
        """Return the value of an arithmetic expression of whole numbers."""
        expanded = " ".join(" ".join(values) for node in nodes for values, _ in self._pieces(node, True))
        plain = re.fullmatch(r"[\w\s()+*/%-]{1,200}", expanded, re.ASCII)
        if plain and not re.search(r"\*\*|\d_|\b0[bBoO]", expanded):  # which are not what they are in Python
            with suppress(SyntaxError, ValueError, RecursionError, MemoryError, ArithmeticError):
                tree = ast.parse(expanded.strip().replace("/", "//"), mode="eval")
                value = self._number(tree.body)
                if -(2**63) <= value < 2**63:
                    return str(value)
        return self._unknown(text, line)

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

    def _test(self, tokens: Sequence[Node], *, pattern: bool) -> bool | None:
        """Decide a condition in brackets; None: only a shell can tell."""
        if len(tokens) > _MOST_TOKENS or any(token.kind == "(" for token in tokens):
            return None
        for joint, wins in (("||", True), ("&&", False), ("-o", True), ("-a", False)):
            for at, token in enumerate(tokens):
                if token.text == joint:
                    sides = [self._test(tokens[:at], pattern=pattern), self._test(tokens[at + 1 :], pattern=pattern)]
                    return wins if wins in sides else None if None in sides else not wins
        if tokens and tokens[0].text == "!":
            inner = self._test(tokens[1:], pattern=pattern)
            return None if inner is None else not inner
        texts = [self._known(word) for word in tokens]
        known = [text for text in texts if text is not None]
        if len(known) < len(texts):
            return None
        if not pattern:  # an empty word without quotes is no word
            known = [text for text, word in zip(known, tokens, strict=True) if text or _QUOTE.search(word.text)]
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
                equal = fnmatchcase(left, self._pattern(tokens[2])) if pattern else left == right
                return equal == (relation != "!=")
            case [left, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as relation, right]:
                numbers = [number or "0" if pattern else number for number in (left, right)]
                if not all(re.fullmatch(r"-?\d{1,18}", number, re.ASCII) for number in numbers):
                    return None if all(numbers) else False  # an empty number is an error in single brackets
                a, b = map(int, numbers)
                return {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}[relation[1:]]
        return None

    def _known(self, word: Node) -> str | None:
        """Return the text of a word in a condition, where variables that nothing sets are empty; None if unknown."""
        text = self._text(word)
        for unknown in self.unknowns(text):
            if not unknown.unset:
                return None
            note = f"line {word.line}: {unknown.text} is not set, and taken as empty in the condition"
            self.notes += [note] if note not in self.notes else []
        return _MARK.sub("", text)


def _operands(nodes: Sequence[Node]) -> Iterator[Node]:
    """Yield the operators and words of a condition, in order."""
    for node in nodes:
        if node.kind in ("binary_expression", "unary_expression", "parenthesized_expression", "negation_expression"):
            yield from _operands(node.parts)
        else:
            yield node


def _behind(redirection: Node) -> Sequence[Node]:
    """Return the words behind a redirection, which are still arguments of its command."""
    return [each for each in redirection.parts if each.kind != "file_descriptor" and each.kind[0] not in "<>&"][1:]

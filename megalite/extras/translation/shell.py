"""Reading of shell scripts: which commands a script would run, with which words. Nothing is run or evaluated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import PurePath

from megalite.errors import ConfigurationError
from megalite.extras.translation.shell_conditions import QUOTE, operands
from megalite.extras.translation.shell_expansion import LARGEST
from megalite.extras.translation.shell_syntax import Node, parse, visible
from megalite.extras.translation.shell_variables import CHANGING, Declarations

_MOST_STEPS, _MOST_CALLS = 20_000, 20
_SUCCEED = ("cd", "mkdir", "echo", "set", "module", "date", "pushd", "popd", "printf", ":", "true", "shift", "ulimit")
_BODIES = ("word", "compound_statement", "subshell", "test_command", "if_statement")
_OF_NO_RUN = re.compile(
    r"(.*/)?(activate|\.?bashrc|\.?(bash_)?profile|(conda|setvars|modules?)\.sh)|/etc/.*", re.DOTALL
)
"""Files that scripts source for their programs, and not for settings of a run."""
_OF_NO_EVAL = re.compile(r"[$`(]+(\S*/)?(conda|mamba|micromamba|ssh-agent|pyenv|brew|modulecmd)\b")
"""Programs whose output scripts evaluate likewise."""
_SUBSTITUTES = re.compile(r"\$\((?!\()|`")


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


class Script(Declarations):
    """State of a script that is read.

    Attributes:
        commands: all commands, in order.
        headers: words of its `#SBATCH` lines.
        leaving: the `return` or `exit` that ends what is followed, and its line; in the end, what has ended the script.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__(variables)
        self.commands: list[Command] = []
        self.headers: list[str] = []
        self._before: tuple[str, ...] = ()
        self.leaving: tuple[str, int] | None = None
        self._status: bool | None = True
        self._left: int | None = None  # line of a return of which only a shell can tell whether it ends the function
        self._steps, self._calls, self._guessed = 0, 0, False

    def read(self, text: str, line: int | None = None) -> None:
        """Follow the commands of a text.

        Args:
            line: number for all lines, if the text was a word in this line of another script.

        Raises:
            ConfigurationError: it is not a shell script, or is larger than a limit.
        """
        if len(text) > LARGEST:
            raise ConfigurationError(f"more than {LARGEST:,} characters: too large for a launch script")
        self._refuse_first_line(text, line or 1)
        self.headers += [w for header in re.findall(r"^#SBATCH\s(.*)", text, re.MULTILINE) for w in header.split()]
        self._refuse_hidden_assignments(commands := parse(text, line))
        self._run(commands.parts)

    # ------------------------------------------------------------------------------------------------ commands

    def _run(self, nodes: Sequence[Node]) -> bool | None:
        """Follow commands. Returns whether the last one succeeds; None: only a shell can tell."""
        status: bool | None = True
        for node, behind in zip_longest(nodes, nodes[1:]):
            run = None if self.leaving else getattr(self, f"_run_{node.kind}", None)
            if run is not None:
                self._steps += 1
                if self._steps > _MOST_STEPS:
                    raise ConfigurationError(f"the script runs more than {_MOST_STEPS:,} commands: too many to follow")
                in_background = behind is not None and behind.kind == "&"
                status = self._status = (self._run_apart(node) or True) if in_background else run(node)
        return status

    @contextmanager
    def _depending_on(self, line: int | None) -> Iterator[None]:
        """Treat what is assigned in the block as unknown if a condition in this line cannot be decided.

        So is what follows in the function if the block returns. What follows an exit runs only if there was none.
        """
        before = self._uncertain
        self._uncertain = line if before is None else before
        yield
        if line is not None and self.leaving:
            self._left = self._uncertain if self.leaving[0] == "return" else self._left
            self.leaving = None
        self._uncertain = self._left if before is None else before

    @contextmanager
    def _ended_by(self, *ways: str) -> Iterator[None]:
        """Let these ways to leave the block end nothing else."""
        kept = self._uncertain, self._left
        self._left = None
        yield
        if self._left is not None and self.leaving and self.leaving[0] == "exit":
            self.leaving = None  # the block may have returned before
        self._uncertain, self._left = kept
        self.leaving = None if self.leaving and self.leaving[0] in ways else self.leaving

    @contextmanager
    def _behind(self, guesses: int) -> Iterator[None]:
        """Take an exit in the block as not reached if there were fewer guesses before its condition."""
        kept = self._guessed
        self._guessed = kept or self._guesses > guesses
        yield
        self._guessed = kept

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Let the block leave this shell as it is."""
        kept = self._variables, self._functions, self._exported, self._locals, self._before, self._shifted
        sourced, moved, exports_all = self._sourced, self._moved, self._exports_all
        self._variables, self._functions, self._exported = dict(kept[0]), dict(kept[1]), set(kept[2])
        self._locals = [dict(each) for each in kept[3]]
        with self._ended_by("return", "exit"):
            yield
        self._variables, self._functions, self._exported, self._locals, self._before, self._shifted = kept
        self._sourced, self._moved, self._exports_all = sourced, moved, exports_all

    def _run_whole(self, nodes: Sequence[Node]) -> bool | None:
        """Follow the commands of a block that a return may end. Returns whether it succeeds."""
        status = self._run(nodes)
        return status if self._left is None else None

    def _run_all(self, node: Node) -> bool | None:
        return self._run(node.parts)

    _run_program = _run_do_group = _run_heredoc_redirect = _run_variable_assignments = _run_all

    def _run_compound_statement(self, node: Node) -> bool | None:
        if node.parts[0].kind == "{":
            return self._run(node.parts)
        self._change(node.text, node.line)
        return None

    def _run_apart(self, *nodes: Node) -> bool | None:
        with self._apart():
            return self._run_whole(nodes)

    def _run_subshell(self, node: Node) -> bool | None:
        return self._run_apart(*node.parts)

    def _run_pipeline(self, node: Node) -> bool | None:
        parts = [part for part in node.parts if part.kind[0] != "|"]
        # A list is no part of it: tree-sitter takes `a | b |& c && d` so.
        found = [self._run([part]) if part.kind == "list" else self._run_apart(part) for part in parts]
        return found[-1] if len(set(found)) == 1 else None  # with pipefail, each may fail it

    def _run_list(self, node: Node) -> bool | None:
        left, joint, *_, right = node.parts
        guesses = self._guesses
        status = self._run([left])
        if status is None or status == (joint.kind == "&&"):
            with self._depending_on(right.line if status is None else None), self._behind(guesses):
                found = self._run([right])
            return None if status is None else found
        return status

    def _run_negated_command(self, node: Node) -> bool | None:
        status = self._run(node.parts)
        return None if status is None else not status

    def _run_if_statement(self, node: Node) -> bool | None:
        """Follow the branch that is taken, or all that may be. Returns its status, or None if that is not known."""
        decided, guesses = True, self._guesses
        for branch in [node, *(part for part in node.parts if part.kind in ("elif_clause", "else_clause"))]:
            then = [part.kind for part in branch.parts].index("then") if branch.kind != "else_clause" else 0
            with self._depending_on(None if decided else node.line):
                holds = self._run(branch.parts[1:then]) if then else True
            if holds is False:
                continue
            decided = decided and holds is True
            with self._depending_on(None if decided else node.line), self._behind(guesses):
                status = self._run(branch.parts[then + 1 :])
            if decided:
                return status
            if holds:
                break
        return True if decided else None

    def _run_case_statement(self, node: Node) -> bool | None:
        """Follow the items that match, or may. Raises ConfigurationError for `;&` and `;;&`."""
        guesses, value, decided = self._guesses, self._known(node.parts[1]), True
        for item in (part for part in node.parts if part.kind == "case_item"):
            end = [part.kind for part in item.parts].index(")")
            if item.parts[-1].kind in (";&", ";;&"):
                raise ConfigurationError(f"line {item.line}: {item.parts[-1].kind} is not followed: write ;;")
            matches = self._matches(value, [part for part in item.parts[:end] if part.kind not in "|("])
            if matches is False:
                continue
            decided = decided and matches is True
            with self._depending_on(None if decided else node.line), self._behind(guesses):
                self._run(item.parts[end:])
            if matches:
                break
        return None

    def _run_for_statement(self, node: Node) -> None:
        """Follow the body of a loop once, with all variables that it changes unknown."""
        *header, body = node.parts
        commands, notes = len(self.commands), len(self.notes)
        for word in header[3:] if node.kind == "for_statement" else ():
            self._fields(word)
        for _ in range(2):  # the second time, it is known what the loop changes
            del self.commands[commands:], self.notes[notes:]
            with self._depending_on(node.line):
                if node.kind != "while_statement":
                    changed = header[1:2] if node.kind == "for_statement" else header
                    self._change(" ".join(part.text for part in changed), node.line)
                self._run([body])
                if node.kind == "while_statement":
                    self._run(header[1:])

    _run_c_style_for_statement = _run_for_statement

    def _run_while_statement(self, node: Node) -> bool | None:
        if self._run(node.parts[1:-1]) is (node.parts[0].kind == "until"):
            return True
        self._run_for_statement(node)
        return None

    def _run_function_definition(self, node: Node) -> bool:
        name, *_, body = (part for part in node.parts if part.kind in _BODIES)
        self._define(name.text, body)
        return True

    def _run_variable_assignment(self, node: Node) -> bool | None:
        self._assign_word(node, lasting=True)
        return None if _SUBSTITUTES.search(node.text) else True

    def _run_test_command(self, node: Node) -> bool | None:
        if node.parts[0].kind == "((":
            return self._run_compound_statement(node)
        return self._test([*operands(node.parts[1:-1])], pattern=node.parts[0].kind == "[[")

    def _run_redirected_statement(self, node: Node) -> bool | None:
        body, *redirections = node.parts
        documents = [each for each in redirections if each.kind == "heredoc_redirect"]
        if body.kind == "command":
            more = [word for each in redirections if each.kind == "file_redirect" for word in _words_behind(each)]
            status = self._run_command(body, more, documents)
        else:
            status = self._run([body])
        self._run(documents)
        return status

    def _run_command(self, node: Node, more: Sequence[Node] = (), documents: Sequence[Node] = ()) -> bool | None:
        """Follow a command with its assignments and redirections. Returns its status, or None if that is not known."""
        line = node.line
        own, words = dict[str, str](), list[Node]()
        for part in node.parts:
            if part.kind == "variable_assignment":
                own |= self._assign_word(part, lasting=False)
            elif part.kind == "file_redirect":
                words += _words_behind(part)
            elif part.kind != "herestring_redirect":
                words.append(part)
        words += more
        fields = [field for word in words for field in self._fields(word)]
        if not fields:
            for name, value in own.items():
                self._assign(name, value, line)
            return None if _SUBSTITUTES.search(node.text) else True
        name = fields[0]
        self._refuse(fields, line)
        if name in self._functions:
            return self._call(name, fields[1:], own, line)
        if name in CHANGING or fields[:2] == ["printf", "-v"]:
            self._change(" ".join(fields[1:]), line)
        elif name == "test":
            return self._test(words[1:], pattern=False)
        elif name == "false":
            return False
        elif name in ("return", "exit"):
            return self._leave(name, "".join(fields[1:2]), line)
        elif name == "shift":
            return self._shift(fields[1:], line)
        elif name == "set":
            return self._set(fields[1:], line)
        elif name in (".", "source"):
            self._skip(" ".join(fields[:2]), line, harmless=bool(_OF_NO_RUN.fullmatch("".join(fields[1:2]))))
        else:
            self._record(fields, own, documents, line)
        return True if name in _SUCCEED else None

    def _leave(self, name: str, code: str, line: int) -> bool | None:
        """Follow a return or an exit.

        An exit is taken as not reached if it fails, since nothing trains behind it, or if it is behind a condition on a
        variable that nothing sets.
        """
        status = None if code else self._status
        if re.fullmatch(r"-?\d{1,9}", code, re.ASCII):
            status = int(code) % 256 == 0
        if name == "exit" and (status is False or self._guessed):
            why = "it fails" if status is False else "its condition has a variable that is not set"
            self.notes += [f"line {line}: exit is taken as not reached, since {why}"] * (self._uncertain is None)
        elif name == "exit" or self._locals:
            self.leaving = name, line
        return status

    def _call(self, name: str, arguments: Sequence[str], own: Mapping[str, str], line: int) -> bool | None:
        """Follow a function, or all that may have this name. Returns whether it succeeds."""
        if self._calls >= _MOST_CALLS:
            raise ConfigurationError(f"line {line}: more than {_MOST_CALLS} calls within each other")
        condition, bodies = self._functions[name]
        status: bool | None = None
        for body in bodies:
            with self._depending_on(condition):
                status = self._follow(body, arguments, {n: v for n, v in own.items() if n not in self._given})
        return status if condition is None else None

    def _follow(self, body: Node, arguments: Sequence[str], own: Mapping[str, str]) -> bool | None:
        """Follow a function with its arguments, and with variables of its own."""
        outer, shifted, moved = dict(self._variables), self._shifted, self._moved
        added = set(own) - self._exported
        self._variables = {name: value for name, value in outer.items() if not name.isdecimal()}
        self._variables |= {str(number): value for number, value in enumerate(arguments, 1)} | dict(own)
        self._shifted, self._moved = 0, None
        self._exported |= added
        self._calls += 1
        self._locals.append({name: outer.get(name) for name in own})
        with self._ended_by("return"):
            status = self._run_whole([body])
        mine = self._locals.pop() | {name: outer.get(name) for name in {*self._variables, *outer} if name.isdecimal()}
        self._calls -= 1
        self._exported -= added
        after = {name: value for name, value in self._variables.items() if name not in mine}
        self._variables = after | {name: value for name, value in mine.items() if value is not None}
        self._shifted, self._moved = shifted, moved
        return status

    def _record(self, fields: list[str], own: Mapping[str, str], documents: Sequence[Node], line: int) -> None:
        """Record a command; follow the script that it gives to a shell, if any."""
        environment = {n: v for n in sorted(self._exported) if isinstance(v := self._variables.get(n), str)} | dict(own)
        names = [PurePath(field).name for field in fields]
        shell = next((at for at, name in enumerate(names) if name in ("bash", "sh")), len(fields))
        option = next((at for at in range(shell, len(fields)) if re.fullmatch(r"-[a-z]*c", fields[at])), len(fields))
        if names[0] == "eval":
            text = " ".join(fields[1:])
            first = self.unknowns(text.split(" ")[0])
            if first and not first[0].unset:
                self._skip(" ".join(fields), line, harmless=bool(_OF_NO_EVAL.match(first[0].text)))
            else:
                self._within(text, line)
        elif option + 1 < len(fields):
            self._refuse_options(fields[shell + 1 : option + 1], line)
            self._inner(fields[option + 1], environment, tuple(fields[:shell]), line)
        elif documents and (names[0] == "sbatch" or shell < len(fields)):
            self._refuse_options([field for field in fields[shell + 1 :] if field[:1] in "-+"], line)
            for document in documents:
                parts = {part.kind: part for part in document.parts}
                text = parts["heredoc_body"].text if "heredoc_body" in parts else ""
                if not QUOTE.search(parts["heredoc_start"].text):  # a shell expands variables in it
                    text = self._text(parts["heredoc_body"], quoted=True) if text else ""
                self._inner(visible(text), environment, tuple(fields[:shell]), line)
        else:
            self.commands.append(Command(tuple(fields), line, environment, self._before))

    def _inner(self, text: str, environment: Mapping[str, str], before: tuple[str, ...], line: int) -> None:
        """Follow the script of another shell, which has the exported variables alone."""
        with self._apart():
            self._variables, self._before = {**environment, **self._given}, (*self._before, *before)
            self._exports_all = False
            self._within(text, line)

    def _within(self, text: str, line: int) -> None:
        """Follow a text that is a word of this script."""
        if self._calls >= _MOST_CALLS:
            raise ConfigurationError(f"line {line}: more than {_MOST_CALLS} shells within each other")
        self._calls += 1
        self.read(text, line)
        self._calls -= 1


def _words_behind(redirection: Node) -> Sequence[Node]:
    """Return the words behind a redirection, which are still arguments of its command."""
    return [each for each in redirection.parts if each.kind != "file_descriptor" and each.kind[0] not in "<>&"][1:]

"""Reading of a launch script: which program it trains with, with which flags, on how many nodes and processes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from megalite.errors import ConfigurationError
from megalite.translation.shell import Command, Script

_LAUNCHERS = {
    *("torchrun", "python", "srun", "sbatch", "deepspeed", "accelerate", "mpirun", "mpiexec", "ft_launcher"),
    *("numactl", "env", "nohup", "exec"),
}
_NO_LAUNCHERS = ("echo", "printf", "cat", "cp", "mv", "rm", "ls", "sed", "grep", "git", "chmod", "tar")
_TRAINING_FLAGS = ("num-layers", "micro-batch-size", "hidden-size", "deepspeed", "per-device-train-batch-size")
_NODES = ("nnodes", "num_nodes", "num_machines", "nodes", "N")
_PER_NODE = ("nproc_per_node", "num_gpus", "ntasks_per_node", "gpus_per_node", "ppn")
_ALL = ("num_processes", "ntasks", "n", "np")


@dataclass(frozen=True)
class Launch:
    """Training command of a script.

    Attributes:
        program: the file of the program.
        argv: its arguments. What only a shell can tell stands as in the script.
        environment: variables that the script exports.
        nodes: number of nodes; None if the script does not say.
        processes_per_node: number of processes on a node; None if the script does not say.
        problems: lines about flags whose values only a shell can tell.
        launcher: words before the program.
        notes: lines about what was assumed.
    """

    program: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    nodes: int | None
    processes_per_node: int | None
    problems: tuple[str, ...]
    launcher: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int | None:
        """Number of processes that the script starts; None if it does not say."""
        return None if self.processes_per_node is None else (self.nodes or 1) * self.processes_per_node


def read_script(text: str, variables: Mapping[str, str] | None = None) -> Launch:
    """Find the training command of a shell script, which is read and not run.

    Args:
        variables: values that take precedence over the script's; "1" is the first argument of the script.

    Raises:
        ConfigurationError: the text is not a shell script, or has no training command.
    """
    if re.search("[\0\ue000-\ue002\ue100-\ue17f\ud800-\udfff]", text + "".join((variables or {}).values())):
        raise ConfigurationError("has characters that no shell script has")
    script = Script(variables or {})
    try:
        script.read(text)
    except RecursionError:
        raise ConfigurationError("its commands are nested too deeply to follow") from None
    found = [(command, at) for command in script.commands if (at := _program_at(command)) is not None]
    if not found:
        raise ConfigurationError(
            f"no command of its {len(script.commands)} starts a training program: expected a line such as "
            "torchrun pretrain_gpt.py --num-layers 24 ..."
        )
    found.sort(key=lambda each: -_likeness(*each))
    (command, at), *others = found
    notes = [*script.notes]
    if others and _likeness(*others[0]) == _likeness(command, at):
        lines = ", ".join(str(each.line) for each, _ in others[:8])
        notes.append(f"line {command.line}: the first training command is taken; there are more in lines {lines}")
    launcher = (*command.before, *command.words[:at])
    program, *argv = command.words[at:]
    nodes, per_node = _places([*script.headers, *launcher])
    return Launch(
        script.shown(program),
        tuple(script.shown(word) for word in argv),
        {name: script.shown(value) for name, value in command.environment.items()},
        nodes,
        per_node,
        tuple(dict.fromkeys(_problems(script, command.line, argv))),
        tuple(script.shown(word) for word in launcher),
        tuple(dict.fromkeys(notes)),
    )


def _program_at(command: Command) -> int | None:
    """Return the index of the training program among the words of a command; None if it starts none."""
    names = [re.sub(r"^(python|torchrun)[\d.]*$", r"\1", PurePath(word).name) for word in command.words]
    at = next((at for at, name in enumerate(names) if name.endswith(".py") or name == "megalite-pretrain"), None)
    if at is None or names[0] in _NO_LAUNCHERS or not _likeness(command, at):
        return None
    return at if at == 0 or "\ue000" in names[0] or not _LAUNCHERS.isdisjoint(names[:at]) else None


def _likeness(command: Command, at: int) -> int:
    """Return how much a program looks like training: by its name, and by its flags."""
    words = {word.partition("=")[0].replace("_", "-").removeprefix("--") for word in command.words[at:]}
    trains = not words.isdisjoint(_TRAINING_FLAGS)
    return 2 * ("train" in PurePath(command.words[at]).name) + trains


def _places(words: Sequence[str]) -> tuple[int | None, int | None]:
    """Return the numbers of nodes and of processes per node that options of launchers give; later ones count."""
    given: dict[str, int] = {}
    for at, word in enumerate(words):
        option, equals, value = word.partition("=")
        attached = re.fullmatch(r"-([Nn])(\d+)", word)
        if attached:
            option, value = f"-{attached[1]}", attached[2]
        elif not equals:
            value = words[at + 1] if at + 1 < len(words) else ""
        name = option.lstrip("-").replace("-", "_")
        if option.startswith("-"):
            elastic = value.rpartition(":")[2]  # torchrun's MIN:MAX
            if elastic.isdecimal() and 0 < len(elastic) < 9:
                given[name] = int(elastic)

    def last(names: Sequence[str]) -> int | None:
        return next((given[name] for name in names if name in given), None)

    nodes, per_node, processes = last(_NODES), last(_PER_NODE), last(_ALL)
    if per_node is None and processes is not None and processes % (nodes or 1) == 0:
        per_node = processes // (nodes or 1)
    return nodes, per_node


def _problems(script: Script, line: int, argv: Sequence[str]) -> Iterator[str]:
    """Yield a line for each flag that needs what only a shell can tell."""
    flag = "the command"
    for word in argv:
        if word.startswith("--"):
            flag = script.shown(word.partition("=")[0])
        for unknown in script.unknowns(word):
            why = f"needs {unknown.text}" + (", which the script does not set" if unknown.unset else "")
            give = f"give --set {unknown.name}=VALUE" if unknown.name else "write its value into the script"
            yield f"line {unknown.line or line}: {flag} {why}: {give}"

"""Reading of a launch script: which program it trains with, with which flags, on how many nodes and processes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from megalite.errors import ConfigurationError
from megalite.extras.translation.shell import Command, Script
from megalite.extras.translation.shell_expansion import Unknown

_LAUNCHERS = {
    *("torchrun", "python", "srun", "sbatch", "deepspeed", "accelerate", "mpirun", "mpiexec", "ft_launcher"),
    *("horovodrun", "numactl", "env", "nohup", "exec"),
}
_NO_LAUNCHERS = ("echo", "printf", "cat", "cp", "mv", "rm", "ls", "sed", "grep", "git", "chmod", "tar")
TORCHTITAN = "torchtitan.train"
_PROGRAMS = ("megalite-pretrain", "megalite-pretrain-hybrid", TORCHTITAN)
_TRAINING_FLAGS = ("num-layers", "micro-batch-size", "hidden-size", "deepspeed", "per-device-train-batch-size")
_EMPTY = re.compile(r"line (\d+): (.*) is not set, and taken as empty in the condition")
_INNER = ("torchrun", "ft_launcher", "deepspeed", "accelerate")
"""Launchers that start the processes of a node. Their numbers count, not those of what starts them on each node."""
_BY_MPI = ("mpirun", "mpiexec", "horovodrun")
"""Launchers whose numbers have the names of mpirun's."""
_OUTER = ("sbatch", "srun", *_BY_MPI)
_MODULES = {
    **dict.fromkeys(("torch.distributed.run", "torch.distributed.launch"), "torchrun"),
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
_INNER_NAMES = ("nnodes", "num_nodes", "num_machines"), ("nproc_per_node", "num_gpus"), ("num_processes",)
_SLURM_NAMES = ("nodes", "N"), ("ntasks_per_node",), ("ntasks", "n")
_MPI_NAMES = ("nodes",), ("npernode", "N", "ppn"), ("np", "n")


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
        launcher: words before the program. What any shell expands is between two marks; what is not known is left out.
        notes: lines about what was assumed.
        uncounted: line about the number of processes, if the script leaves it to the machine.
        unclear: lines about variables whose values only a shell can tell.
        shell: number of words of the launcher that start the shell which expands the rest.
    """

    program: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    nodes: int | None
    processes_per_node: int | None
    problems: tuple[str, ...]
    launcher: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    uncounted: str = ""
    unclear: Mapping[str, str] = field(default_factory=dict)
    shell: int = 0

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
        reasons = script.notes[:1]
        if script.leaving:
            reasons.append(f"line {script.leaving[1]} ends the script: is an argument missing, as in --set 1=VALUE?")
        raise ConfigurationError(
            f"no command of its {len(script.commands)} starts a training program: expected a line such as "
            "torchrun pretrain_gpt.py --num-layers 24 ..." + "".join(f"; {reason}" for reason in reasons)
        )
    found.sort(key=lambda each: -_likeness(*each))
    (command, at), *others = found
    notes = _together(script.notes)
    if others and _likeness(*others[0]) == _likeness(command, at):
        lines = ", ".join(str(each.line) for each, _ in others[:8])
        notes.append(f"line {command.line}: the first training command is taken; there are more in lines {lines}")
    launcher = (*command.before, *command.words[:at])
    program, *argv = command.words[at:]
    nodes, per_node, uncounted = _places(script, launcher)
    kept, unsettled = _kept(script, command.line, launcher)
    before, _ = _kept(script, command.line, command.before)
    unclear = {
        name: _need(script, command.line, name, value)
        for name, value in command.environment.items()
        if not all(unknown.expands for unknown in script.unknowns(value))
    }
    return Launch(
        script.shown(program),
        tuple(script.shown(word) for word in argv),
        {name: script.for_a_shell(value) for name, value in command.environment.items()},
        nodes,
        per_node,
        tuple(dict.fromkeys([*unsettled, *_problems(script, command.line, argv)])),
        tuple(kept),
        tuple(dict.fromkeys(notes)),
        uncounted,
        unclear,
        len(before),
    )


def _together(notes: Sequence[str]) -> list[str]:
    """Return notes with those on variables that conditions take as empty in one line, if there are several."""
    empty = [found for note in notes if (found := _EMPTY.fullmatch(note))]
    if len(empty) < 2:
        return list(notes)
    names, lines = (", ".join(dict.fromkeys(found[part] for found in empty)) for part in (2, 1))
    others = [note for note in notes if not _EMPTY.fullmatch(note)]
    return [*others, f"lines {lines}: {names} are not set, and taken as empty in conditions"]


def _program_at(command: Command) -> int | None:
    """Return the index of the training program among the words of a command; None if it starts none."""
    names = [_name_of(word) for word in command.words]
    at = next((at for at, name in enumerate(names) if name.endswith(".py") or name in _PROGRAMS), None)
    if at is None or names[0] in _NO_LAUNCHERS or not _likeness(command, at):
        return None
    return at if at == 0 or "\ue000" in names[0] or not _LAUNCHERS.isdisjoint(names[:at]) else None


def _name_of(word: str) -> str:
    """Return the name of a program without its folder, and without the version of Python or torchrun."""
    return re.sub(r"^(python|torchrun)[\d.]*$", r"\1", PurePath(word).name)


def _likeness(command: Command, at: int) -> int:
    """Return how much a program looks like training: by its name, and by its flags."""
    words = {word.partition("=")[0].replace("_", "-").removeprefix("--") for word in command.words[at:]}
    return 2 * ("train" in PurePath(command.words[at]).name) + (not words.isdisjoint(_TRAINING_FLAGS))


def _launchers(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the words of each launcher of a command by its name."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        plain = _name_of(word)
        name = _MODULES.get(plain, plain if plain in _LAUNCHERS else name)
        found.setdefault(name, []).append(word)
    return found


def _options(words: Sequence[str]) -> dict[str, str]:
    """Return the options among words, with their values; later ones count."""
    given: dict[str, str] = {}
    for at, word in enumerate(words):
        option, equals, value = word.partition("=")
        attached = re.fullmatch(r"-([Nn])(\d+)", word)
        if attached:
            option, value = f"-{attached[1]}", attached[2]
        elif not equals:
            value = words[at + 1] if at + 1 < len(words) else ""
        if option.startswith("-"):
            given[option.lstrip("-").replace("-", "_")] = value
    return given


def _places(script: Script, words: Sequence[str]) -> tuple[int | None, int | None, str]:
    """Return the numbers of nodes and of processes per node, and a line if the script leaves one to the machine."""
    parts = _launchers(words)
    inner = next((name for name in _INNER if name in parts), None)
    started = [word for name in _OUTER for word in parts.get(name, ())]

    def found(words: Sequence[str], names: Sequence[Sequence[str]]) -> list[str | None]:
        given = _options(words)
        return [next((given[name] for name in each if name in given), None) for each in names]

    outer = [*script.headers, *started] if started or inner else []
    by_mpi = not parts.keys().isdisjoint(_BY_MPI)
    nodes, per_node, processes = found(outer, _MPI_NAMES if by_mpi else _SLURM_NAMES)
    if inner:
        own, per_node, processes = found(parts[inner], _INNER_NAMES)
        if own is not None and not (nodes and "SLURM" in script.shown(own)):
            nodes = own
        if inner == "deepspeed":
            nodes = nodes or _options(parts[inner]).get("hostfile")
        if inner in ("torchrun", "ft_launcher"):
            per_node = per_node or "1"
            nodes = re.sub(r"^\d+:(?=\d+$)", "", nodes or "") or None  # the most of MIN:MAX
    for flag, word in (("--nnodes", nodes), ("--nproc-per-node", per_node or processes)):
        if word and not re.fullmatch(r"0*[1-9]\d{0,7}", word, re.ASCII):
            unknown = next(iter(script.unknowns(word)), None)
            count = int(nodes) if flag != "--nnodes" and nodes else None
            why = f"{flag} {script.shown(word)}" + (f" in line {unknown.line}" if unknown else "")
            ways = [f"--set {unknown.name}=VALUE"] if unknown and unknown.name else []
            ways += ["--ranks RANKS"] * (flag != "--nnodes")
            why += f" is not a number that the script tells: give {' or '.join(ways) or 'it in the script'}"
            return count, None, why
    count = int(nodes) if nodes else None
    if per_node:
        return count, int(per_node), ""
    if processes and int(processes) % (count or 1) == 0:
        return count, int(processes) // (count or 1), ""
    if processes:
        why = f"--nproc-per-node: {processes} processes do not divide among {nodes} nodes: give --ranks RANKS"
        return count, None, why
    if inner or by_mpi:
        return count, None, f"--nproc-per-node: {inner or 'mpirun'} is not told how many processes: give --ranks RANKS"
    return count, None, ""


def _kept(script: Script, line: int, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of a launcher that any shell can expand, and lines about the others."""
    kept, problems = list[str](), list[str]()
    for at, word in enumerate(words):
        option = words[at - 1] if at and words[at - 1].startswith("-") and "=" not in words[at - 1] else ""
        name = script.shown(word.partition("=")[0] if word.startswith("-") else option)
        unknowns = script.unknowns(word)
        if not unknowns or (name and all(unknown.expands for unknown in unknowns)):
            kept.append(script.for_a_shell(word))
            continue
        if name.lstrip("-").replace("-", "_") not in {each for names in _INNER_NAMES for each in names}:
            unknown = next((each for each in unknowns if not each.expands), unknowns[0])
            problems.append(_need_of(unknown, line, name or "the launcher"))
        if option and kept[-1:] == [option]:
            kept.pop()
    return kept, problems


def _problems(script: Script, line: int, argv: Sequence[str]) -> Iterator[str]:
    """Yield a line for each flag that needs what only a shell can tell."""
    flag = "the command"
    for word in argv:
        if word.startswith("--"):
            flag = script.shown(word.partition("=")[0])
        for unknown in script.unknowns(word):
            yield _need_of(unknown, line, flag)


def _need_of(unknown: Unknown, line: int, flag: str) -> str:
    """Return the line about a flag that needs what only a shell can tell."""
    why = f"needs {unknown.text}" + (", which the script does not set" if unknown.unset else "")
    give = f"give --set {unknown.name}=VALUE" if unknown.name else "write its value into the script"
    return f"line {unknown.line or line}: {flag} {why}: {give}"


def _need(script: Script, line: int, flag: str, word: str) -> str:
    """Return the line about a word whose value no other shell can tell."""
    return next(_need_of(unknown, line, flag) for unknown in script.unknowns(word) if not unknown.expands)

"""Faults within a process of a disturbed command.

This file is executed by `injected/sitecustomize.py` at the start of each Python process of the command, so it imports
nothing but the standard library, and nothing of megalite. It wraps the functions of the named sites when their modules
are imported. Rank and process are looked up when a site is reached: a process may be forked from one that has imported
everything, and get its rank afterwards.

All processes of a run write to the folder of its plan: `records.jsonl`, with a line for each process, step and fault,
and `fired/N`, a file that exists when fault N has occurred.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import functools
import gc
import importlib.abc
import importlib.machinery
import io
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "MEGALITE_CHAOS_RANK")
"""Variables that say which rank a process is, the first that is set."""
_SLOWER = 0.2
_SLOW_STEPS = 10
_WRITES = os.O_WRONLY | os.O_RDWR


def install(plan: str) -> None:
    """Wrap the functions of the plan (a JSON file) as soon as their modules are imported."""
    described = json.loads(Path(plan).read_text())
    chaos = Chaos(Path(plan).parent, Path(described["run"]), described)
    sys.meta_path.insert(0, Finder(chaos.wrappers))


class Finder(importlib.abc.MetaPathFinder):
    """Finder that leaves modules to the others, and has functions of some of them wrapped after their execution."""

    def __init__(self, wrappers: Mapping[str, Sequence[Callable[[ModuleType], None]]]) -> None:
        self._wrappers = wrappers

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return what the next finder returns."""
        if fullname not in self._wrappers:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                wrapped = functools.partial(self._execute, fullname, spec.loader.exec_module)
                spec.loader.exec_module = wrapped  # type: ignore[method-assign]
                return spec
        return None

    def _execute(self, name: str, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        for wrap in self._wrappers[name]:
            wrap(module)


class Chaos:
    """Sites and faults of a run, as this process and those forked from it see them."""

    def __init__(self, folder: Path, run: Path, plan: Mapping[str, Any]) -> None:
        self.folder, self.run = folder, run
        self._faults: dict[int, dict[str, Any]] = dict(enumerate(plan["faults"]))
        self._checkpoints = plan["checkpoints"]
        self._number = plan["step"].get("number")
        self._process = 0
        self._calls: Counter[str] = Counter()
        self._slow_steps = 0
        self.disk: Disk | None = None
        self.wrappers: dict[str, list[Callable[[ModuleType], None]]] = {}
        for name, site in plan["sites"].items():
            self._add(site["function"], functools.partial(self._reaching, name, site.get("when", "before")))
        self._add(plan["step"]["function"], self._stepping)

    def _add(self, function: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        module, _, name = function.partition(":")
        self.wrappers.setdefault(module, []).append(functools.partial(_replace, name=name, wrapped=wrapped))

    # ------------------------------------------------------------------------------------------------ in a function

    def _reaching(self, site: str, when: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def reaching(*arguments: Any, **named: Any) -> Any:
            if when == "before":
                self.reach(site)
            result = function(*arguments, **named)
            if when == "after":
                self.reach(site)
            return result

        return reaching

    def _stepping(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a record of each step that it has finished."""

        @functools.wraps(function)
        def stepping(*arguments: Any, **named: Any) -> Any:
            if self._slow_steps:
                self._slow_steps -= 1
                time.sleep(_SLOWER)
            result = function(*arguments, **named)
            rank = self._enter()
            if rank is not None:
                number = result if self._number is None else attrgetter(self._number)(arguments[0])
                self.record("step", rank, number=number, calls=self._calls)
            return result

        return stepping

    def _enter(self) -> int | None:
        """Return the rank of this process, None if it is none. Record the process when it is first seen."""
        text = next((os.environ[name] for name in RANKS if os.environ.get(name, "").isdigit()), None)
        if text is None:
            return None
        if self._process != os.getpid():  # it may have been forked
            self._process = os.getpid()
            self._calls.clear()
            self.record("process", int(text))
        return int(text)

    def reach(self, site: str) -> None:
        """Count a call of a site, and let the faults occur that are due."""
        rank = self._enter()
        if rank is None:
            return
        self._calls[site] += 1
        if self._calls[site] == 1:
            self.record("site", rank, calls={site: 1})
        for number, fault in list(self._faults.items()):
            if fault["site"] == site and fault["rank"] == rank and fault["occurrence"] <= self._calls[site]:
                after = fault["after"]
                if after is not None and not self._mark(after).exists():
                    continue
                del self._faults[number]
                if self._first(number):
                    kept = {"sizes": sizes_of(self.run)} if fault["kind"] == "lying-fsync" else {}
                    self.record("fault", rank, fault=number, calls=self._calls, **kept)
                    self._occur(fault)

    def _mark(self, number: int) -> Path:
        return self.folder / "fired" / str(number)

    def _first(self, number: int) -> bool:
        """Tell whether the fault has not occurred before, in any process; from now on it has."""
        try:
            os.close(os.open(self._mark(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def record(self, kind: str, rank: int, **values: Any) -> None:
        """Append a line to the records of the run."""
        line = {"record": kind, "rank": rank, "process": os.getpid(), "time": time.monotonic(), **values}
        descriptor = os.open(self.folder / "records.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(descriptor, json.dumps(line).encode() + b"\n")
        os.close(descriptor)

    # ------------------------------------------------------------------------------------------------ what happens

    def _occur(self, fault: Mapping[str, Any]) -> None:
        """Let a fault occur in this process."""
        kind, seconds, generator = fault["kind"], fault["seconds"], random.Random(fault["seed"])
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "exception":
            raise RuntimeError("an exception that chaos has planted")
        elif kind == "gil":
            ctypes.PyDLL(None).sleep(int(seconds))
        elif kind == "bit-in-memory":
            self.record("note", fault["rank"], text=flip_in_memory(generator))
        elif kind == "bit-in-file":
            self.record("note", fault["rank"], text=flip_in_file(self.run, self._checkpoints, generator))
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind in ("full-disk", "slow-disk"):
            self.disk = self.disk or Disk(self.run)
            self.disk.disturb(kind, seconds)
        elif kind == "slow-rank":
            self._slow_steps = _SLOW_STEPS
        # The others (network, lying-fsync) are up to the tool, which reads the record.


def _replace(module: ModuleType, name: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of a module, or a method of a class there, by one around it."""
    owner, _, last = name.rpartition(".")
    holder = attrgetter(owner)(module) if owner else module
    setattr(holder, last, wrapped(getattr(holder, last)))


def sizes_of(run: Path) -> dict[str, int]:
    """Return the size of each file below a folder, by its inode."""
    found = {}
    for path in run.rglob("*"):
        with contextlib.suppress(OSError):  # it may have been renamed meanwhile
            if path.is_file():
                found[str(path.stat().st_ino)] = path.stat().st_size
    return found


def flip_in_memory(generator: random.Random) -> str:
    """Flip one bit of one element of a random parameter of this process, and describe it."""
    torch = import_module("torch")
    found = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    leaves = [each for each in found if each.requires_grad and each.is_leaf]
    parameters = [each for each in leaves if each.numel() and not each.is_meta]  # shapes alone have no bits
    if not parameters:
        return "there was no parameter to flip a bit of"
    chosen = generator.choice(parameters)
    element, bit = generator.randrange(chosen.numel()), generator.randrange(8 * chosen.element_size())
    place = tuple(int(index) for index in torch.unravel_index(torch.tensor(element), chosen.shape))
    bits = chosen.detach()[place].reshape(1).clone().view(torch.uint8)
    bits[bit // 8] ^= 1 << bit % 8
    chosen.detach()[place] = bits.view(chosen.dtype)[0]
    return f"bit {bit} of element {element} of a parameter of shape {tuple(chosen.shape)}"


def flip_in_file(run: Path, pattern: str, generator: random.Random) -> str:
    """Flip one bit of a random file in the newest folder of a run that the pattern finds files in; describe it."""
    files = sorted(path for path in run.glob(pattern) if path.is_file() and path.stat().st_size)
    newest = [path for path in files if path.parent == files[-1].parent]
    if not newest:
        return "there was no file to flip a bit of"
    chosen = generator.choice(newest)
    bit = generator.randrange(8 * chosen.stat().st_size)
    with chosen.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))
    return f"bit {bit} of {chosen.relative_to(run)}"


class Disk:
    """Disk below a folder that is full or slow for a while, for the functions that Python writes through."""

    def __init__(self, folder: Path) -> None:
        """Take the place of the functions; once a process."""
        self._folder, self._kind, self._until = str(folder.resolve()), "", 0.0
        opener, os_open = io.open, os.open

        @functools.wraps(opener)
        def opening(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
            if set(mode) & set("wax+") and not isinstance(file, int):
                self._meet(file)
            return opener(file, mode, *arguments, **named)

        @functools.wraps(os_open)
        def os_opening(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
            if flags & _WRITES:
                self._meet(path)
            return os_open(path, flags, *arguments, **named)

        builtins.open = io.open = opening
        os.open = os_opening
        for name in ("write", "fsync", "fdatasync", "pwrite", "writev"):
            setattr(os, name, self._around(getattr(os, name)))

    def disturb(self, kind: str, seconds: float) -> None:
        """Begin a disturbance."""
        self._kind, self._until = kind, time.monotonic() + seconds

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def writing(descriptor: int, *arguments: Any) -> Any:
            if time.monotonic() < self._until:
                self._meet(os.readlink(f"/proc/self/fd/{descriptor}"))
            return function(descriptor, *arguments)

        return writing

    def _meet(self, path: Any) -> None:
        """Fail or wait, if the path lies in the folder and the disturbance is not over."""
        if time.monotonic() >= self._until or not isinstance(path, str | os.PathLike):
            return
        if not (os.path.realpath(path) + os.sep).startswith(self._folder + os.sep):
            return
        if self._kind == "slow-disk":
            time.sleep(_SLOWER)
        else:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

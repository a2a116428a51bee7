"""A program run on one input in a forked process with limits, and the rule that says whether it did right."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import resource
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CODES = (0, 64, 85, 93)
"""Exit codes of megalite/errors.py, except for 70, which is a defect."""
SECONDS = 10.0
IDLE_SECONDS = 3.0
"""In which a process that waits for nobody has used no CPU time: what it waits for will not come."""
MEMORY = 1 << 30
MOST_LINES, MOST_CHARACTERS = 10, 8000
"""Largest size of a message."""
_LARGEST_FILE = 1 << 30
_TICK = 0.005
_PAGE = resource.getpagesize()
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
WATCHED = ("in", "cwd", "home", "tmp", "outside")
"""Folders that a program may leave nothing in: what it writes is below `out`, which its flags name."""
_DEFECTS = re.compile(rb"Traceback \(most recent call last\)|Exception in thread|panicked at|a defect in megalite")
_FRAME = re.compile(r'(?:File ")?[^"\n]*?/((?:megalite|tools|kernels)/[\w/.]+\.py)", line (\d+)')


@dataclass(frozen=True)
class Outcome:
    """Outcome of a program.

    Attributes:
        fault: description of the fault; None if there is none.
        place: place of the fault, as far as known: findings with the same fault and place are the same.
        code: exit code, or minus the number of a signal; None if the program was stopped.
        output: the end of its output.
    """

    fault: str | None
    place: str
    code: int | None
    output: str
    seconds: float


def adopt_orphans() -> None:
    """Become the parent of what a child leaves behind, so that it is seen."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def time_limit() -> float:
    """The limit of an idle machine, stretched by what else this one has to do."""
    return SECONDS * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def make_folders(base: Path) -> None:
    """The folders of one input, with a file outside that nobody has to know or change."""
    for name in (*WATCHED, "out"):
        (base / name).mkdir(parents=True, exist_ok=True)
    (base / "outside" / "secret").write_text("b0f7e1 secret\n")


def start(
    program: Callable[[], object], base: Path, environment: Mapping[str, str] | None = None, name: str = "program"
) -> int:
    """Fork a process that runs a program in the folders of `base`; returns its id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.setsid()
        os.chdir(base / "cwd")
        kept = {key: value for key, value in os.environ.items() if key in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")}
        os.environ.clear()
        os.environ.update(kept | {"HOME": str(base / "home"), "TMPDIR": str(base / "tmp"), "OMP_NUM_THREADS": "1"})
        os.environ.update(environment or {})
        tempfile.tempdir = None
        for number, path, flags in (
            (0, Path(os.devnull), os.O_RDONLY),
            (1, base / f"{name}.stdout", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
            (2, base / f"{name}.stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        ):
            os.dup2(os.open(path, flags, 0o600), number)
        sys.stdin, sys.stdout = open(0), open(1, "w", buffering=1)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR2, file=(base / f"{name}.stacks").open("wb"), all_threads=True)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_FILE, _LARGEST_FILE))
        try:
            program()
            code = 0
        except SystemExit as ending:
            code = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run(
    program: Callable[[], object], base: Path, referee: Callable[[], str | None], allowed: Sequence[Path] = ()
) -> Outcome:
    """Run a program on an input that lies in `base`, and judge it.

    Args:
        referee: called where the program has ended with 0; says why it should not have.
        allowed: what it may write beside `out`.
    """
    before = snapshot(base)
    begin, limit = time.monotonic(), time_limit()
    process = start(program, base)
    fault = code = None
    used, moved = 0, begin
    while code is None:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
        else:
            now, (ticks, asleep, size) = time.monotonic(), usage(process)
            if ticks != used or not asleep:
                used, moved = ticks, now
            if now - begin > limit or ticks > SECONDS * _TICKS_A_SECOND:
                fault = "no end"
            elif now - moved > IDLE_SECONDS:
                fault = "no end: it waits for what does not come"
            elif size > MEMORY:
                fault = "too much resident memory"
        if fault:
            break
        time.sleep(_TICK)
    seconds = time.monotonic() - begin
    place = ""
    if code is None:
        place = _stop(process, base / "program.stacks")
    left = _end_orphans()
    text = b"".join((base / f"program.{stream}").read_bytes()[-20_000:] for stream in ("stdout", "stderr"))
    output = text.decode(errors="replace")
    if fault is None:
        fault, place = judge(code, text, (base / "program.stderr").read_bytes())
    changed = [name for name in changes(before, snapshot(base)) if not _named(base / name, allowed)]
    if fault is None and changed:
        fault, place = "something was written outside", changed[0]
    if fault is None and left:
        fault = "a process was left behind"
    if fault is None and code == 0 and (reason := referee()):
        fault, place = "accepted what is wrong", reason
    return Outcome(fault, place, code, output[-3000:], seconds)


def _named(path: Path, allowed: Sequence[Path]) -> bool:
    """Tell whether a path is inside one of the allowed paths, or a parent folder of one."""
    return any(path.is_relative_to(each) or each.is_relative_to(path) for each in allowed)


def judge(code: int | None, output: bytes, errors: bytes) -> tuple[str | None, str]:
    if _DEFECTS.search(output):
        return "a traceback", _last_place(output.decode(errors="replace"))
    if code not in CODES:
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return f"ended by {how}", _last_place(output.decode(errors="replace"))
    if code and not errors.strip():
        return "ended without a message", ""
    if code and (errors.strip().count(b"\n") >= MOST_LINES or len(errors) > MOST_CHARACTERS):
        return "a message of many lines", re.sub(r"[^a-z ]+", "", errors[:60].decode(errors="replace"))
    return None, ""


def _last_place(text: str) -> str:
    places = _FRAME.findall(text)
    kind = re.findall(r"^(\w*(?:Error|Exception|Interrupt|Warning|Exit)\b)", text, re.MULTILINE)
    return " ".join([*(f"{file}:{line}" for file, line in places[-1:]), *kind[-1:]])


def _stop(process: int, stacks: Path) -> str:
    """End a process, and tell where it was."""
    os.kill(process, signal.SIGUSR2)
    time.sleep(0.1)
    places = _FRAME.findall(stacks.read_text(errors="replace").rpartition("Current thread")[2])
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return f"{places[0][0]}:{places[0][1]}" if places else ""


def _end_orphans() -> bool:
    """Kill children that the ended process has left after a second; tells whether there were any."""
    deadline = time.monotonic() + 1.0
    while True:
        try:
            found, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if not found:
            if time.monotonic() > deadline:
                break
            time.sleep(_TICK)
    for child in children(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    return True


def children(process: int) -> list[int]:
    """The processes that one has started, of any of its threads."""
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            found += map(int, Path(f"/proc/{process}/task/{task}/children").read_text().split())
    return found


def usage(process: int) -> tuple[int, bool, int]:
    """The CPU time of a process and those that it has started, in ticks; whether all sleep; their resident memory."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, True, 0
    # As proc(5) numbers them, from the third on.
    ticks, asleep, size = int(fields[11]) + int(fields[12]), fields[0] != "R", int(fields[21]) * _PAGE
    for each in map(usage, children(process)):
        ticks, asleep, size = ticks + each[0], asleep and each[1], size + each[2]
    return ticks, asleep, size


Snapshot = Mapping[str, tuple[int, int, int, str]]


def snapshot(base: Path) -> Snapshot:
    """Names, kinds, sizes and times of all that lies in the watched folders."""
    found = {}
    for top in WATCHED:
        for folder, folders, names in os.walk(base / top):
            for name in (*folders, *names):
                path = os.path.join(folder, name)
                status = os.lstat(path)
                kind, target = stat.S_IFMT(status.st_mode), ""
                if stat.S_ISLNK(status.st_mode):
                    target = os.readlink(path)
                about = (0, 0) if stat.S_ISDIR(status.st_mode) else (status.st_size, status.st_mtime_ns)
                found[os.path.relpath(path, base)] = (kind, *about, target)
    return found


def changes(before: Snapshot, after: Snapshot) -> Sequence[str]:
    """The names of what is there before or after only, or has another content."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))

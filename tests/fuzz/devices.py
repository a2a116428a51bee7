"""Files on devices, nodes and faults: classes of devices, measured seconds, sick nodes, ledgers, schedules of chaos."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.edits import JSON, Codec, Edit
from tests.fuzz.programs import MOCK, SIZES, command

_CLASS = {
    "nodes": 1, "gpus_per_node": 1, "memory_gib": 80, "tflops": 800, "memory_gb_per_s": 4000, "node_gb_per_s": 300,
    "network_gb_per_s": 50,
    "flags": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}  # fmt: skip
_SITES = {
    "recovery": ["loading"],
    "sites": {"loading": {"function": "a.b:load", "when": "after"}, "step": {"function": "a.b:C.step"}},
    "step": {"function": "a.b:C.step", "number": "x.y"},
    "results": {
        "records": "m.jsonl", "number": "iteration", "loss": "loss", "samples": "", "ignored": ["time"],
        "weights": "w*", "checkpoints": "c/*",
    },
}  # fmt: skip
_FAULTS = [[{"kind": "kill", "rank": 0, "site": "step", "occurrence": 2}, {"kind": "stop", "rank": 1, "moment": 0.5,
             "after": 0, "seconds": 1.0, "seed": 3, "site": None}]]  # fmt: skip
_LEDGER = [{"step": step, "kind": "dealt", "source": [0], "samples": [[0, 3]], "outcome": "trained", "why": "x"}
           for step in (1, 2, 3)]  # fmt: skip
_PIPELINE = ("--num-layers", "4", "--pp", "2", "--pipeline-model-parallel-layout")


def _toml(tree: Any, valid: bytes) -> bytes:
    """Write a tree as TOML with a line for each value, whatever the value is."""
    if not isinstance(tree, dict):
        return JSON.encode(tree, valid)
    parts: tuple[list[bytes], list[bytes]] = [], []
    for name, value in tree.items():
        key = json.dumps(name).encode(errors="surrogatepass")
        if isinstance(value, dict):
            inner = b"".join(
                json.dumps(each).encode(errors="surrogatepass") + b" = " + _value(what, valid) + b"\n"
                for each, what in value.items()
            )
            parts[1].append(b"[" + key + b"]\n" + inner)
        else:
            parts[0].append(key + b" = " + _value(value, valid) + b"\n")
    return b"".join((*parts[0], *parts[1]))


def _value(value: Any, valid: bytes) -> bytes:
    if not isinstance(value, dict):
        return JSON.encode(value, valid)
    pairs = (
        json.dumps(key).encode(errors="surrogatepass") + b" = " + _value(each, valid) for key, each in value.items()
    )
    return b"{" + b", ".join(pairs) + b"}"


TOML = Codec(
    lambda data: tomllib.loads(data.decode()),
    _toml,
    ("inf", "nan", "-inf", "1979-05-27", "07:32:00", "1_000", "0x" + "f" * 5000, "'''", '"""', "a.b", "{a = {b = 1}}",
     "[" * 5000, "{a.b.c = 1}", "1e400", "true\n[x]\n[x]"),
)  # fmt: skip


def prepare(base: Path) -> None:
    """Write valid files of all of these formats."""
    folder = base / "in"
    (folder / "run").mkdir()
    (folder / "classes.toml").write_bytes(_toml({"fast": _CLASS, "slow": _CLASS | {"tflops": 400}}, b""))
    (folder / "seconds.json").write_text(json.dumps({"seconds": [0.25, 0.5], "layout": "Ett|ttL"}))
    (folder / "sites.toml").write_bytes(_toml(_SITES, b""))
    (folder / "schedule.json").write_text(json.dumps(_FAULTS))
    sick = [{"node": f"n{n}", "time": "2026-01-01", "why": "x"} for n in range(3)]
    for name, lines in (("sick_nodes.jsonl", sick), ("ledger.jsonl", _LEDGER)):
        (folder / "run" / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_devices(base: Path, edits: Sequence[Edit]) -> Callable[[], object]:
    """Return what a run of two ranks does with the file that was edited."""
    folder = base / "in"
    if edits[0][0] == "seconds.json":
        return partial(_read_run, [*SIZES, *MOCK, "--train-iters", "1", *_PIPELINE, f"auto:{folder}/seconds.json"])
    given = ("--device-classes", str(folder / "classes.toml"))
    return partial(_read_run, [*SIZES, *MOCK, "--train-iters", "1", *_PIPELINE, "auto", *given])


def _read_run(flags: list[str]) -> None:
    from megalite.config.parse import parse_arguments
    from megalite.config.validate import resolve
    from megalite.extras.planner.device_classes import require_valid_classes, with_device_classes
    from megalite.extras.planner.stage_layout import with_stages
    from megalite.lifecycle.failure import run_main

    def main() -> int:
        config = parse_arguments(flags).config
        mixed = config.parallel.device_classes is not None
        config, _ = with_stages(with_device_classes(config, 2) if mixed else config, 2)
        if mixed:
            require_valid_classes(config, 2)
        resolve(config, 2)
        return 0

    run_main(main)


def read_nodes(base: Path, edits: Sequence[Edit]) -> Callable[[], object]:
    """Return what a run that continues does with its ledger, or an agent with the list of sick nodes."""
    run = base / "in" / "run"
    return (
        partial(_read_ledger, run / "ledger.jsonl") if edits[0][0] == "run/ledger.jsonl" else partial(_read_sick, run)
    )


def _read_ledger(path: Path) -> None:
    from megalite.lifecycle.failure import run_main
    from megalite.training.ledger import Ledger

    def main() -> int:
        Ledger(path, 2).close()
        return 0

    run_main(main)


def _read_sick(directory: Path) -> None:
    from megalite.extras.recovery.spares import sick_nodes

    sick_nodes(directory)


def read_chaos(base: Path, _: Sequence[Edit]) -> Callable[[], object]:
    """Return a disturbance of a command that ends at once."""
    files = ("--schedule", base / "in" / "schedule.json", "--sites-file", base / "in" / "sites.toml")
    return partial(command, "tools/chaos.py", *files, "--output", base / "out" / "chaos", "--", "true", "{run}")

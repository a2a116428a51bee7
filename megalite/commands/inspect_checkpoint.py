"""Look into a checkpoint, check it, or compare two; or say what becomes of all that a folder says.

    python tools/checkpoint/inspect.py Llama-3.2-1B
    python tools/checkpoint/inspect.py --load run/small-llama
    python tools/checkpoint/inspect.py --load run/small-llama --tensors 'model/layers.0.*' --statistics
    python tools/checkpoint/inspect.py --load run/small-llama/iter_0000300 --verify
    python tools/checkpoint/inspect.py --diff run/small-llama run/resharded

A folder alone may be a Hugging Face folder, a checkpoint of Megatron-LM, or one of megalite. Each key of its files, or
argument of its run, is used, noted or refused, before anything is trained or converted.

Exit codes: 93 if a folder's model is refused and 64 if its tokenizer is; 93 if --verify finds damage or --statistics an
element that is not finite; 1 if --diff finds any difference.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megalite.config.checkpoint import CheckpointConfig, checkpoints_in, is_url
from megalite.config.fields import CORES, Workers
from megalite.config.layer_specs import pattern_of
from megalite.config.tool_arguments import POSITIONAL, parse_tool_arguments
from megalite.errors import CheckpointError, ConfigurationError
from megalite.lifecycle.failure import run_tool
from megalite.process.output import say, table

if TYPE_CHECKING:
    from megalite.checkpoint.comparison import Comparison
    from megalite.checkpoint.reader import CheckpointReader
    from megalite.conversion.folder_keys import KeyFate

WIDTH = 110
"""Longest line of what becomes of keys."""
MOST_BEFORE = 4
"""Most keys that stand before what becomes of them; more follow it."""
WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


@dataclass(frozen=True)
class Arguments:
    """The flags."""

    folder: str | None = field(default=None, metadata=POSITIONAL)
    """The folder of a model, of which each key is shown with what becomes of it."""
    load: str | None = None
    """The run directory, whose latest checkpoint is taken, or one checkpoint in it (iter_0000100)."""
    diff: tuple[str, str] | None = None
    """Two of these to compare: training state, configuration, tensors, and values, whatever layouts saved them."""
    tensors: str = "*"
    """Only tensors whose names match this pattern, such as 'model/layers.0.*' or 'optimizer/*'."""
    config: bool = False
    """Show the configuration of the run."""
    verify: bool = False
    """Compare every byte with its checksum, and list all that is damaged, missing or foreign."""
    statistics: bool = False
    """Show minimum, maximum, mean, deviation and norm per tensor, and count zero, denormal and non-finite elements."""
    json: bool = False
    """Print one JSON object, with all that is known of each tensor, instead of tables."""
    workers: Workers = CORES
    """Threads that read; by default one per core."""


def main() -> None:
    """Parse the flags and show a checkpoint, or the differences between two."""
    arguments = parse_tool_arguments(Arguments, description=__doc__ or "")
    if [arguments.folder, arguments.load, arguments.diff].count(None) != 2:
        raise ConfigurationError("give a FOLDER, --load, or --diff with two checkpoints")
    if arguments.folder is not None and (arguments.config or arguments.verify or arguments.statistics):
        raise ConfigurationError("--config, --verify and --statistics are about a checkpoint: give it as --load")
    if arguments.diff is not None and (arguments.config or arguments.verify or arguments.statistics):
        raise ConfigurationError("--config, --verify and --statistics are about one checkpoint: give it as --load")
    if arguments.diff is not None:
        show_differences(arguments, *arguments.diff)
    elif arguments.load is not None:
        show_checkpoint(arguments, arguments.load)
    elif arguments.folder is not None:
        show_fates(arguments, arguments.folder)


def show_fates(arguments: Arguments, folder: str) -> None:
    """Show what becomes of each key of a folder, by file or section.

    Raises:
        CheckpointError: the folder is refused; its keys are shown before.
        DataError: its tokenizer is.
    """
    fates = key_fates(folder)
    if arguments.json:
        say(json.dumps({place: [asdict(each) for each in found] for place, found in fates.items()}), exact=True)
    else:
        say("\n".join(line for place, found in fates.items() for line in (place, *fate_lines(found), "")))
    usable = try_opening(folder)
    if not arguments.json:
        say(f"{folder} can be {usable}")


def key_fates(folder: str) -> dict[str, list[KeyFate]]:
    """Return the fates of a folder's keys by file, or by section of its options."""
    if kind_of(folder) != "megalite":
        from megalite.conversion.key_fates import fates_of_folder

        return fates_of_folder(Path(folder))
    from megalite.training.load_report import option_fates

    return option_fates(open_checkpoint(folder).manifest.config)


def kind_of(folder: str) -> Literal["huggingface", "megatron", "megalite"]:
    """Return which program's folder this is; that of megalite may be on an object store. Raises CheckpointError."""
    if not is_url(folder) and not Path(folder).is_dir():
        raise CheckpointError(f"{folder} is no folder: give that of a model, or of a run")
    if CheckpointConfig(load=folder).loads_huggingface:
        return "huggingface"
    return "megatron" if not is_url(folder) and checkpoints_in(Path(folder)) == "megatron" else "megalite"


def try_opening(folder: str) -> str:
    """Open a folder's model and tokenizer, without its weights, and return what can be done with it, and its layers.

    Raises CheckpointError or DataError if it is refused.
    """
    kind = kind_of(folder)
    if kind == "megalite":
        letters = layers_of(open_checkpoint(folder))
        return "loaded" if letters is None else f"loaded: layers {letters}"
    if kind == "huggingface":
        from megalite.inference.loading import load_tokenizer, open_model

        model = open_model(folder)
        if model.tokenizer is not None:
            load_tokenizer(model)
        return f"loaded: layers {pattern_of(model.config.layers)}"
    from megalite.conversion.megatron import open_megatron

    return f"converted: layers {pattern_of(open_megatron(Path(folder)).config.layers)}"


def layers_of(reader: CheckpointReader) -> str | None:
    """Return the layers of a checkpoint as letters of --hybrid-layer-pattern; None if a program has its model.

    Raises CheckpointError if the model is refused.
    """
    from megalite.checkpoint.compatibility import model_config

    config = reader.manifest.config
    if "kind" in config.get("model", {"kind": None}):
        return None
    return pattern_of(model_config(reader.path, config).layers)


def fate_lines(fates: Sequence[KeyFate]) -> list[str]:
    """Return the lines for the keys of a file: what is refused first, and keys of the same fate together."""
    groups = dict[tuple[str, str], list[str]]()
    for fate in sorted(fates, key=lambda each: ("refused", "used", "noted").index(each.kind)):
        groups.setdefault((fate.kind, fate.why), []).append(fate.key)
    shown: list[str] = []
    for (kind, why), keys in groups.items():
        names = " ".join(keys)
        text = names if not why else f"{names}: {why}" if len(keys) <= MOST_BEFORE else f"{why}: {names}"
        shown += textwrap.wrap(text, WIDTH, initial_indent=f"  {kind:9}", subsequent_indent=" " * 13, **WHOLE_WORDS)
    return shown


def show_checkpoint(arguments: Arguments, path: str) -> None:
    """Show the contents of a checkpoint, then the results of the checks that the flags request.

    Raises:
        CheckpointError: a check found problems.
    """
    from megalite.checkpoint import directory, inspection
    from megalite.process.progress import in_threads, show_progress

    reader = open_checkpoint(path)
    tensors = reader.manifest.tensors
    names = matching(tensors, arguments.tensors)
    found = inspection.describe(reader, names)
    folder = reader.path.resolve()
    complete = directory.complete(folder.parent)
    with contextlib.suppress(CheckpointError):  # of another version, whose tensors can be shown all the same
        found["layers"] = layers_of(reader)
    found["others"] = [other.name for _, other in sorted(complete.items()) if other != folder]
    problems = []
    if arguments.verify:
        with show_progress("verifying", sum(tensor.size for tensor in tensors.values())) as advance:
            damages = inspection.verify(reader, arguments.workers, advance)
        found["damage"] = [{"file": each.file, "tensor": each.tensor, "problem": each.problem} for each in damages]
        problems += [f"{len(damages)} damaged: load another checkpoint"] if damages else []
    if arguments.statistics:
        with show_progress("reading", sum(tensors[name].size for name in names)) as advance:
            values = in_threads(arguments.workers, lambda name: inspection.statistics(reader, name, advance), names)
        found["statistics"] = {name: each.to_json() for name, each in zip(names, values, strict=True)}
        bad = [name for name, each in found["statistics"].items() if each["nans"] or each["infinities"]]
        problems += [f"{len(bad)} tensors are not finite: {', '.join(bad)}"] if bad else []
    say(json.dumps(found) if arguments.json else "\n".join(lines(arguments, found)), exact=arguments.json)
    if problems:
        raise CheckpointError(f"{reader.path}: {'; '.join(problems)}")


def open_checkpoint(path: str) -> CheckpointReader:
    from megalite.checkpoint import directory
    from megalite.checkpoint.reader import CheckpointReader
    from megalite.storage import open_directory

    return CheckpointReader(directory.resolve(open_directory(path)))


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names that match the pattern. Raises ConfigurationError if there are none."""
    names = list(names)
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        raise ConfigurationError(f"--tensors {pattern}: there is no such tensor; a name is {names[0]}" if names else "")
    return found


def show_differences(arguments: Arguments, first: str, second: str) -> None:
    """Show the differences between two checkpoints; exits with 1 if there are any, otherwise with 0."""
    from megalite.checkpoint.comparison import compare, compared_bytes
    from megalite.process.progress import show_progress

    a, b = open_checkpoint(first), open_checkpoint(second)
    names = matching(sorted(a.manifest.tensors | b.manifest.tensors), arguments.tensors)
    with show_progress("comparing", compared_bytes(a, b, names)) as advance:
        found = compare(a, b, names, arguments.workers, advance)
    if arguments.json:
        say(json.dumps({"a": str(a.path), "b": str(b.path), "same": found.same} | strict(asdict(found))), exact=True)
    else:
        say("\n".join([f"a: {a.path}", f"b: {b.path}", *difference_lines(found)]))
    sys.exit(0 if found.same else 1)


# ------------------------------------------------------------------------------------------------------ as text


def lines(arguments: Arguments, found: dict[str, Any]) -> list[str]:
    """Return the contents of a checkpoint and the results of checks as lines of text."""
    facts = {"checkpoint": found["checkpoint"], "others": ", ".join(found["others"]) or "none"}
    facts |= {"layers": found["layers"]} if found.get("layers") else {}
    facts |= {name.replace("_", " "): value for name, value in found["training"].items()}
    shown = [f"{name:18} {shown_value(value)}" for name, value in facts.items()]
    if arguments.config:
        for section, values in found["config"].items():
            shown += ["", section, *(f"  {name:42} {shown_value(value)}" for name, value in values.items())]
    if arguments.statistics:
        columns = list(next(iter(found["statistics"].values())))
        rows = [
            [name, *(shown_value(each[column]) for column in columns)] for name, each in found["statistics"].items()
        ]
        shown += ["", *table(["tensor", *columns], rows)]
    elif not arguments.verify and not arguments.config:
        shown += tensor_lines(found["tensors"])
    kinds = [[kind, *map(shown_value, values.values())] for kind, values in found["totals"].items()]
    files = [[file, *map(shown_value, values.values())] for file, values in found["files"].items()]
    shown += ["", *table(["kind", "tensors", "elements", "bytes"], kinds)]
    shown += ["", *table(["file", "bytes", "boxes", "tensors"], files)]
    if arguments.verify:
        problems = [f"{damage['file']}: {damage['problem']}" for damage in found["damage"]]
        shown += ["", *(problems or ["every byte is as it was written"])]
    return shown


def tensor_lines(tensors: dict[str, Any]) -> list[str]:
    rows = []
    for name, tensor in tensors.items():
        numbers = shown_value(len(tensor["boxes"])), shown_value(tensor["bytes"])
        kind = [str(list(tensor["shape"])), tensor["dtype"]]
        rule = [tensor.get("relayout", "")] if any("relayout" in each for each in tensors.values()) else []
        rows.append([name, *kind, *rule, *numbers, holders(tensor["boxes"])])
    rule = ["replicas"] if any("relayout" in each for each in tensors.values()) else []
    return ["", *table(["tensor", "shape", "dtype", *rule, "boxes", "bytes", "files"], rows)]


def holders(boxes: Sequence[dict[str, Any]]) -> str:
    """Return the names of the files that contain a tensor, abbreviated if there are many."""
    files = [file.removesuffix(".safetensors") for file in dict.fromkeys(box["file"] for box in boxes)]
    return " ".join(files) if len(files) <= 3 else f"{files[0]} ... {files[-1]} ({len(files)})"


def difference_lines(found: Comparison) -> list[str]:
    """Return tables of the differences between two checkpoints, and lists of the tensors that one of them lacks."""
    shown: list[str] = []
    for what in ("training", "config"):
        rows = [[name, *map(shown_value, pair)] for name, pair in getattr(found, what).items()]
        shown += ["", *table([what, "a", "b"], rows)] if rows else []
    for what, names in (("a", found.only_in_a), ("b", found.only_in_b)):
        shown += ["", f"only in {what}", *names] if names else []
    if found.kinds:
        shown += ["", *table(["tensor", "in a", "in b"], [[name, *kinds] for name, kinds in found.kinds.items()])]
    if found.values:
        header = ["tensor", "elements", "different", "absolute", "relative"]
        of_values = [[name, *map(shown_value, asdict(values).values())] for name, values in found.values.items()]
        shown += ["", *table(header, of_values)]
    equal = found.compared - len(found.values)
    return [*shown, "", f"{equal:,} of {found.compared:,} tensors that both have in the same shape are equal"]


def shown_value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {None: "-", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list) and len(str(value)) > 80:
        return f"{str(value)[:60]}... ({len(value)} in all)"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value) if str(value).isprintable() else repr(value)  # the text may come from an untrusted file


def strict(value: Any) -> Any:
    """Return a value that is valid in strict JSON: infinities and NaN become strings."""
    if isinstance(value, dict):
        return {name: strict(each) for name, each in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


command = partial(run_tool, main)

"""Collect the training commands of Megatron-LM's tests and examples, and of its forks, as lists of flags.

    python -m tests.megatron_commands.collect MEGATRON_CLONE [FORK_CLONE ...] > tests/megatron_commands/commands.json

The clones are bare or not, and are only read. Scripts are read by `megalite.extras.translation.script`, never
executed; what a script leaves to its arguments and to the shell is given a value that fits (`VALUES`).
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from megalite.errors import ConfigurationError
from megalite.extras.translation.script import read_script

TESTS_AT = "d98e8a64"
RELEASES = ["v2.5", *(f"core_v0.{minor}.0" for minor in range(4, 17)), TESTS_AT]
TESTS = re.compile(r"tests/functional_tests/test_cases/(gpt|moe|mixtral|hybrid|nemotron)/\w+/model_config\.yaml")
EXAMPLES = re.compile(r"examples/(.*/)?\w*(gpt3?|llama\w*|mixtral|starcoder|apertus)[\w.-]*\.(sh|sbatch)")
OTHER_PROGRAMS = re.compile(
    "export|inference|generat|server|bert|t5|multimodal|eval|finetune|distill|academic|retro|/rl/|tokenizer"
)
NO_TRAINING = ("--inference-max-seq-length", "--perform-rl-step", "--export-te-mcore-model", "--num-tokens-to-generate")
VALUES = {"REPEAT": "1", "DATA_BLEND": "DATA", "TRAIN_SAMPLES": "1000"}
"""Values of variables that a command is given from outside; others are their own names, as paths."""


def main() -> None:
    """Print the commands."""
    megatron, *forks = map(Path, sys.argv[1:])
    found = [*of_tests(megatron)]
    for release in RELEASES:
        found += of_examples(megatron, release)
    for fork in forks:
        found += of_examples(fork, "HEAD")
    sources: dict[str, list[str]] = {}
    for source, flags in found:
        sources.setdefault(shlex.join(flags), []).append(source)
    rows = [json.dumps({"sources": names, "flags": flags}) for flags, names in sources.items()]
    print("[\n" + ",\n".join(rows) + "\n]")


def of_tests(clone: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the source and the flags of each functional test that trains."""
    for path in files(clone, TESTS_AT):
        if not TESTS.fullmatch(path):
            continue
        test = yaml.safe_load(read(clone, TESTS_AT, path))
        flags = test.get("MODEL_ARGS") or {}
        if test.get("MODE", "pretraining") == "pretraining" and flags and not set(NO_TRAINING) & set(flags):
            argv = [word for flag, value in flags.items() for word in of_test(flag, value)]
            yield f"{TESTS_AT}:{path}", argv


def of_test(flag: str, value: Any) -> list[str]:
    """Return the words of a flag in a test, as the script that starts Megatron-LM's tests writes them."""
    if value is True or value is False:
        return [flag] * value
    text = re.sub(r"\$\{?(\w+)\}?", lambda name: VALUES.get(name[1], name[1]), str(value)).strip()
    return [flag, *(text[1:-1].split() if re.fullmatch(r"\[.*\]", text) else [text])]


def of_examples(clone: Path, revision: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the source and the flags of each example script that trains."""
    for path in files(clone, revision):
        if not EXAMPLES.fullmatch(path) or OTHER_PROGRAMS.search(path.lower()):
            continue
        try:
            launch = read_script(read(clone, revision, path), VALUES)
        except ConfigurationError as error:
            print(f"{clone.parent.name} {revision}:{path}: {error}", file=sys.stderr)
            continue
        name = "" if clone.parent.name.startswith("NVIDIA") else clone.parent.name.replace("+", "/") + " "
        yield (
            f"{name}{revision}:{path}",
            [re.sub(r"[\s$<>{}]+", "_", word) if re.search("[$<>{}]", word) else word for word in launch.argv],
        )


def files(clone: Path, revision: str) -> list[str]:
    """Return the files of a revision."""
    return git(clone, "ls-tree", "-r", "--name-only", revision).splitlines()


def read(clone: Path, revision: str, path: str) -> str:
    """Return the text of a file."""
    return git(clone, "show", f"{revision}:{path}")


def git(clone: Path, *arguments: str) -> str:
    """Return the output of a git command."""
    return subprocess.run(["git", "-C", clone, *arguments], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()

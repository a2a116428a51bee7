"""Other programs are started in one place, and none runs a file of the current folder."""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path

import pytest

from megalite.process import programs
from megalite.process.programs import pretrain, python, run, safe_path

ROOT = Path(__file__).parents[2]
SOURCES = [*ROOT.glob("megalite/**/*.py"), *ROOT.glob("kernels/**/*.py"), *ROOT.glob("tools/**/*.py")]
STARTS = {
    "subprocess": {"run", "Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput"},
    "os": {"system", "popen", "posix_spawn", "posix_spawnp", "startfile"}
    | {name for name in dir(os) if name.startswith(("exec", "spawn"))},
    "multiprocessing": {"get_context", "Process", "Pool"},
}
_MAY_START = re.compile(
    "|".join(rf"\b{module}\s*\.\s*({'|'.join(names)})\b|from {module} import" for module, names in STARTS.items())
)
SPAWNING = Path("megalite/preprocessing/workers.py")
"""The one file that lets multiprocessing start interpreters: each start stands in `safe_path`."""


def starts(tree: ast.AST) -> list[str]:
    """Return the calls in a file that start programs."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    attributes = [call for call in calls if isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name)]
    return [f"{c.value.id}.{c.attr}" for c in attributes if c.attr in STARTS.get(c.value.id, ())]  # type: ignore[attr-defined]


def test_programs_are_started_in_one_place() -> None:
    found = {}
    for path in SOURCES:
        text = path.read_text()
        if not _MAY_START.search(text):  # as most files: parsing all of them takes seconds
            continue
        tree = ast.parse(text)
        if calls := starts(tree):
            found[path.relative_to(ROOT)] = calls
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in STARTS:
                assert not STARTS[node.module] & {alias.name for alias in node.names}, path
    own = Path(programs.__file__).relative_to(ROOT)
    assert found == {own: ["subprocess.run", "subprocess.Popen"], SPAWNING: ["multiprocessing.get_context"]}


@pytest.mark.parametrize("words", [("-c", "import json"), ("-m", "json.tool", "--help")], ids=["-c", "-m"])
def test_an_interpreter_runs_no_module_of_the_current_folder(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("open('executed', 'w')")
    assert run(python(*words), cwd=tmp_path, capture_output=True).returncode == 0
    assert not (tmp_path / "executed").exists()


def test_pretraining_is_found_from_a_clone_that_is_not_installed(tmp_path: Path) -> None:
    """The import path has no site-packages with megalite: -S leaves them out, and the standard library needs none."""
    name, option, *rest = pretrain("--help")
    look = "import megalite.process.programs as found; print(found.__file__)"
    code = rest[1].replace("from megalite.commands.pretrain import command; command()", look)
    ended = run([name, "-S", option, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout.strip() == programs.__file__, ended.stderr


def test_a_program_finds_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import beside")
    (tmp_path / "beside.py").write_text("print('found')")
    assert run(python(tmp_path / "program.py"), capture_output=True, text=True).stdout == "found\n"


def test_interpreters_of_libraries_run_no_module_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("open('executed', 'w')")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with safe_path():
        run([sys.executable, "-c", "import json"], cwd=tmp_path)
    assert not (tmp_path / "executed").exists()
    assert "PYTHONSAFEPATH" not in os.environ


@pytest.mark.wide
def test_workers_of_preprocessing_run_no_module_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": "a"}\n' * 20)
    for name in ("pickle", "json", "socket", "torch"):
        (tmp_path / f"{name}.py").write_text("open('executed', 'w')")
    flags = ["--input", "corpus.jsonl", "--output-prefix", "corpus", "--tokenizer-type", "ByteTokenizer"]
    ended = run(
        [*python(ROOT / "tools/preprocess_data.py"), *flags, "--workers", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "executed").exists()

"""The planted faults still find the code that they change, and name tests that exist."""

from __future__ import annotations

import os
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants import FILES, ROOT, Mutant, mutants_of

ALL = [mutant for file in FILES for mutant in mutants_of(file)]
KEYS = ["fault", "file", "old", "new", "test"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_mutants_find_their_texts_and_their_tests(
    file: Path, request: pytest.FixtureRequest, collected_tests: set[str]
) -> None:
    document = tomllib.loads(file.read_text())
    assert list(document) == ["mutant"]
    wrong = [f"{fields}: its keys are not {KEYS}" for fields in document["mutant"] if list(fields) != KEYS]
    assert not wrong, "\n".join(wrong)
    whole_suite = request.config.args_source is pytest.Config.ArgsSource.TESTPATHS
    functions = {name.partition("[")[0] for name in collected_tests}
    for mutant in mutants_of(file):
        path, _, test = mutant.test.partition("::")
        imported = whole_suite and not path.startswith("tests/extras/")  # which `make test` leaves aside
        source, tests = (place.read_text() if place.is_file() else "" for place in (ROOT / mutant.file, ROOT / path))
        for reason, is_wrong in {
            f"belongs in {_room(mutant)}.toml": _room(mutant) != file.stem,
            f"its text occurs {source.count(mutant.old)} times in {mutant.file}": source.count(mutant.old) != 1,
            "changes nothing": mutant.old == mutant.new,
            f"there is no {mutant.test}": f"def {test.partition('[')[0]}(" not in tests
            or (imported and mutant.test not in collected_tests | functions),
        }.items():
            if is_wrong:
                wrong.append(f"{mutant.fault}: {reason}")
    assert not wrong, "\n".join(wrong)


def _room(mutant: Mutant) -> str:
    """The name of the file in which a mutant belongs."""
    top, *folders = mutant.file.split("/")[:-1] or ["megalite"]
    rooms = folders[1:] if folders[:1] == ["extras"] else folders
    return top if top != "megalite" else rooms[0] if rooms else "foundations"


def test_no_fault_is_told_twice() -> None:
    assert not [fault for fault, count in Counter(mutant.fault for mutant in ALL).items() if count > 1]


def test_a_text_that_is_gone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("a = 1\na = 1\n")
    for old, count in (("b = 1", 0), ("a = 1", 2)):
        with pytest.raises(ValueError, match=f"occurs {count} times in file.py"):
            Mutant("fault", "file.py", old, "", "").apply(tmp_path)


def test_a_mutant_changes_no_other_tree_and_leaves_no_bytecode_of_what_it_changes(tmp_path: Path) -> None:
    for name in ("file.py", "file_2.py", "__pycache__/file.cpython-311.pyc", "__pycache__/file_2.cpython-311.pyc"):
        (tmp_path / "whole" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "whole" / name).write_text("a = 1\n")
        os.link(tmp_path / "whole" / name, tmp_path / "tree" / name)
    Mutant("fault", "file.py", "1", "2", "").apply(tmp_path / "tree")
    assert (tmp_path / "tree/file.py").read_text() == "a = 2\n"
    assert (tmp_path / "whole/file.py").read_text() == "a = 1\n"
    assert [path.name for path in (tmp_path / "tree/__pycache__").iterdir()] == ["file_2.cpython-311.pyc"]
    assert len(list((tmp_path / "whole/__pycache__").iterdir())) == 2

"""Every public name is on the page of the library, in an example that runs."""

from __future__ import annotations

import ast
import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megalite
from tests.harness.job import Job

pytestmark = pytest.mark.costly

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("library.md", "parallel_layers.md")]


def test_the_examples_of_the_page_run() -> None:
    failed, tried = doctest.testfile(str(PAGES[0]), module_relative=False, optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert tried > 40
    assert failed == 0


def test_every_public_name_is_in_an_example() -> None:
    parser, used = doctest.DocTestParser(), set[str]()
    for page in PAGES:
        for example in parser.get_examples(page.read_text()):
            tree = ast.walk(ast.parse(example.source))
            used |= {
                node.attr for node in tree if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "megalite"
            }
    assert set(megalite.__all__) <= used


def test_names_are_imported_when_they_are_used() -> None:
    program = "import sys, megalite; megalite.Layout(zero=1); print('torch' in sys.modules); megalite.Trainer; print(1)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["False", "1"]
    assert set(megalite.__all__) <= set(dir(megalite))


@pytest.mark.wide
def test_the_program_of_the_readme_runs(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(import .*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    script = tmp_path / "program.py"
    script.write_text(f"import os\n\nos.chdir({str(tmp_path)!r})\n{program}")
    with Job([script], 1, tmp_path / "job", told=[{}]) as job:
        assert job.wait() == [0], job.stderr(0)
        assert "finished after step 100" in job.stdout(0)
    assert (tmp_path / "run/squares/DONE").exists()

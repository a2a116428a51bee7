"""Documents that quote or name parts of the code: what they say is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = (
    "README.md",
    "AGENTS.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *sorted(
        str(path.relative_to(ROOT)) for folder in ("docs", "benchmarks/planner") for path in ROOT.glob(f"{folder}/*.md")
    ),
)
QUOTE = re.compile(r"^`([\w/]+\.py)`:\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```python\n", re.MULTILINE)
PATH = re.compile(
    r"`((?:megalite|kernels|tests|docs|tools|slurm|examples|benchmarks(?!/results/))/[\w./-]*\w)(?:::(\w+)(?:\[.*?\])?)?`"
)


def is_quoted(quote: str, source: str) -> bool:
    """Tell whether the parts of a quotation, between lines with an ellipsis, stand in the source in this order."""
    parts = re.split(r"^ *\.\.\.\n", quote, flags=re.MULTILINE)
    return re.search("^" + ".*?^".join(map(re.escape, parts)), source, re.MULTILINE | re.DOTALL) is not None


@pytest.mark.parametrize("page", ["README.md", "docs/tour.md"])
def test_code_is_quoted_word_for_word(page: str) -> None:
    text = (ROOT / page).read_text()
    quotes = QUOTE.findall(text)
    assert quotes
    if page == "docs/tour.md":
        assert len(quotes) == len(FENCE.findall(text)), "each quotation begins with its file: `path.py`:"
    wrong = [f"{file}:\n{quote}" for file, quote in quotes if not is_quoted(quote, (ROOT / file).read_text())]
    assert not wrong, f"{page} quotes what is not there (any more):\n\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("quote", "expected"),
    [
        ("a = 1\nb = 2\n", True),
        ("a = 1\n...\nd = 4\n", True),
        ("b = 2\n    ...\n    c = 3\n", True),
        ("a = 1\nd = 4\n", False),
        ("d = 4\n...\na = 1\n", False),
        ("a = 2\n", False),
        ("= 1\n", False),
    ],
)
def test_a_quotation_may_leave_out_lines_but_change_none(quote: str, expected: bool) -> None:
    assert is_quoted(quote, "a = 1\nb = 2\n    c = 3\nd = 4\n") == expected


def test_the_names_of_the_glossary_are_those_of_the_code() -> None:
    rows = re.findall(r"^\|([^|]*)\|", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    code = "".join(path.read_text() for path in (ROOT / "megalite").rglob("*.py"))
    assert names
    assert not [name for name in names if not re.search(rf"\b{name}\b", code)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_and_tests_that_are_named_exist(document: str) -> None:
    for path, test in PATH.findall((ROOT / document).read_text()):
        assert (ROOT / path).exists(), f"{document} names {path}"
        assert not test or f"def {test}(" in (ROOT / path).read_text(), f"{document} names {path}::{test}"


def test_messages_that_are_quoted_exist() -> None:
    """Compare docs/troubleshooting.md with literals of the code, between dots that stand for names and numbers."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    messages = [line for language, block in blocks if not language for line in block.splitlines()]
    code = "".join(path.read_text() for path in (ROOT / "megalite").rglob("*.py"))
    code = re.sub(r"""["']\n *f?["']""", "", code)  # literals that stand below each other are one
    assert len(messages) > 15
    for message in messages:
        parts = [part.strip() for part in message.split("...") if len(part.strip()) > 1]
        assert parts
        assert not [part for part in parts if part not in code], message


def test_the_page_for_agents_names_what_exists() -> None:
    page = (ROOT / "AGENTS.md").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", page, re.MULTILINE))
    paths = set(re.findall(r"(?<![\w./-])((?:[\w-]+/)+[\w.-]*|[\w-]+\.(?:md|py|toml|yml))(?![\w/])", page))
    modules = set(re.findall(r"python -m ((?:megalite|tests)[\w.]*)", page))
    assert targets >= named > {"setup", "check", "test", "lint"}
    assert {"CONTRIBUTING.md", "tests/oracle.py", "megalite/config/", "pyproject.toml"} <= paths
    assert not [path for path in paths if not (ROOT / path).exists()]
    assert modules
    assert not [name for name in modules if not list(ROOT.glob(name.replace(".", "/") + "*"))]


def test_the_readme_tells_how_many_lines_there_are() -> None:
    def lines(*places: str) -> int:
        paths = [
            path for place in places for path in ((ROOT / place).rglob("*.py") if "." not in place else [ROOT / place])
        ]
        return sum(len(path.read_text().splitlines()) for path in paths)

    def packages(names: str) -> list[str]:
        return [f"megalite/{name}" for name in names.split()]

    step = packages("parallel model pipeline optim")
    of_training = [f"megalite/training/{name}.py" for name in ["trainer", "loss_terms", "batches", "builder"]]
    actual = [
        lines(*step, "megalite/run/loop.py", *of_training),
        lines(*step, *packages("config data checkpoint training tasks run")),
        lines("megalite", "kernels", "tools", *(path.name for path in ROOT.glob("pretrain_*.py"))),
    ]
    told = re.search(r"about ([\d,]+) lines:.*?about ([\d,]+), and all of .*? ([\d,]+)\.", README, re.DOTALL)
    assert told is not None
    for stated, number in zip(told.groups(), actual, strict=True):
        assert abs(int(stated.replace(",", "")) - number) <= 0.03 * number, f"README says {stated}, there are {number}"

"""The file of a schedule: what it may say, and one line for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.errors import DataError
from megalite.extras.mixes.schedule import Phase, SourceFiles, mixed_prefixes, read_schedule, tokens_of

SOURCES = "sources: {web: {path: a}, math: {path: b, max_epochs: 4}}\n"
FIRST = "phases:\n  - weights: {web: 0.7, math: 0.3}\n"


def read(folder: Path, text: str) -> object:
    (folder / "mix.yaml").write_text(text)
    return read_schedule(str(folder / "mix.yaml"))


def test_what_a_schedule_says(tmp_path: Path) -> None:
    text = """
        sources:
          web: {path: data/web}
          code: {paths: [data/python, data/rust], max_epochs: 1.5}
        phases:
          - weights: {web: 7, code: 3}
          - {from: 2_000, weights: {code: 1}}
          - {from: 1.5M, weights: {web: 1e-3, code: 1}}
    """
    (tmp_path / "mix.yaml").write_text(text)
    found = read_schedule(str(tmp_path / "mix.yaml"))
    assert found.sources == {
        "web": SourceFiles(("data/web",)),
        "code": SourceFiles(("data/python", "data/rust"), 1.5),
    }
    assert found.phases == (
        Phase(0, {"web": 7.0, "code": 3.0}),
        Phase(2000, {"code": 1.0}),
        Phase(1_500_000, {"web": 0.001, "code": 1.0}),
    )
    assert mixed_prefixes(str(tmp_path / "mix.yaml")) == ["data/web", "data/python", "data/rust"]


def test_thousands_of_sources_stand_in_lists(tmp_path: Path) -> None:
    """A list has a line for each file, as lists of mixes have; a name with several lines is one source."""
    lines = [f"source{number % 3000},data/file{number}" for number in range(5000)]
    (tmp_path / "files.txt").write_text("# name,prefix\n\n" + "\n".join(lines))
    (tmp_path / "weights.txt").write_text("".join(f"source{number},{number + 1}\n" for number in range(3000)))
    (tmp_path / "mix.yaml").write_text(
        f"sources: {tmp_path}/files.txt\nphases:\n  - weights: {tmp_path}/weights.txt\n"
        "  - {from: 1T, weights: {source7: 1}}\n"
    )
    found = read_schedule(str(tmp_path / "mix.yaml"))
    assert len(found.sources) == 3000
    assert found.sources["source1"].prefixes == ("data/file1", "data/file3001")
    assert found.phases[0].weights["source2999"] == 3000
    assert found.phases[1] == Phase(10**12, {"source7": 1.0})


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("0", 0),
        ("2_000_000", 2_000_000),
        ("2T", 2 * 10**12),
        ("1.5b", 1_500_000_000),
        ("2e12", 2 * 10**12),
        ("3 K", 3000),
    ],
)
def test_numbers_of_tokens(text: str, tokens: int) -> None:
    assert tokens_of(text) == tokens


MISTAKES = {
    "": "expected sources and phases",
    "[1]": "expected sources and phases",
    SOURCES: "phases is missing",
    FIRST: "sources is missing",
    SOURCES + FIRST + "more: 1": "line 4: unknown key 'more'",
    "sources: {web: {}}\n" + FIRST: "line 1: 'web': give path: PREFIX, or paths: a list",
    "sources: {web: {path: a, paths: [b]}}\n" + FIRST: "'web': give path: PREFIX, or paths",
    "sources: {web: {path: a, epochs: 1}}\n" + FIRST: "'web' has an unknown key 'epochs'",
    "sources: {web: {path: a, max_epochs: 0}}\n" + FIRST: "max_epochs of web is 0: it must be positive",
    "sources: {web: {path: a}, math: {path: a}}\n" + FIRST: "a is in web and math: its samples would be repeated",
    "sources: {web: {paths: [a, a]}}\nphases:\n  - weights: {web: 1}": "a is in web and web",
    "sources: {web: {path: a}, web: {path: b}}\n" + FIRST: "line 1: 'web' is given twice",
    "sources: {web@1: {path: a}}\n" + FIRST: "names of sources are without @",
    SOURCES + "phases: []": "line 2: phases: expected a list",
    SOURCES + "phases:\n  - weights: {}": "line 3: a phase needs at least one source",
    SOURCES + "phases:\n  - {from: 5, weights: {web: 1}}": "line 3: the first phase must begin at 0",
    SOURCES + FIRST + "  - weights: {web: 1}": "line 4: from is missing",
    SOURCES + FIRST + "  - {from: soon, weights: {web: 1}}": "line 4: from: 'soon' is no number of tokens",
    SOURCES
    + FIRST
    + "  - {from: 0, weights: {web: 1}}": "line 4: this phase begins at token 0, but the one before it at 0",
    SOURCES
    + FIRST
    + "  - {from: 9, weights: {web: 1}, until: 10}": "a phase has from .a number of tokens. and weights",
    SOURCES
    + "phases:\n  - weights: {web: 0}": "line 3: the weight of web is 0: it must be positive; leave a source out",
    SOURCES + "phases:\n  - weights: {web: -0.5}": "line 3: the weight of web is -0.5: it must be positive",
    SOURCES + "phases:\n  - weights: {web: .nan}": "the weight of web is '.nan', which is no number",
    SOURCES + "phases:\n  - weights: {web: 1e-13, math: 1}": "line 3: the weight of web is less than 1e-12 of all",
    SOURCES + "phases:\n  - weights: {web: 1e308, math: 1e308}": "is less than 1e-12 of all",
    SOURCES + "phases:\n  - weights: {web: inf}": "the weight of web is inf: it must be positive",
    SOURCES + "phases:\n  - weights: {wen: 1}": "there is no source 'wen', did you mean web?",
    SOURCES + "phases:\n  - weights: nowhere.txt": "nowhere.txt cannot be read: No such file",
    "sources: [": "not YAML",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_each_mistake_is_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match=MISTAKES[text]) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)
    assert "mix.yaml" in str(caught.value) or "nowhere" in str(caught.value)


def test_a_line_of_a_list_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "files.txt").write_text("web,a\nmath\n")
    with pytest.raises(DataError, match=r"files.txt, line 2: expected name,value and found 'math'"):
        read(tmp_path, f"sources: {tmp_path}/files.txt\n{FIRST}")

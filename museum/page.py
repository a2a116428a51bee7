"""Scores of all detectors, in docs/museum.md."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from museum.cases import ROOT
from museum.entries import Entry, entries
from museum.score import SCORES, Score, read_scores

PAGE = ROOT / "docs" / "museum.md"
BEGIN, END = "<!-- scores: python -m museum.score --page -->", "<!-- end of scores -->"
OURS = "verify"
LEGEND = """\
**c** the wrong run is accused, and the right one is not; **t** the first tensor or figure that is named is the right
one; **h** so is the hypothesis that is named first; **–** the wrong run is not accused; **?** the detector says that it
cannot tell; **!** the right run is accused, too; an empty cell was not run.
"""
_Scores = Mapping[str, Mapping[str, Score]]


def write_page() -> None:
    """Write the scores into the page, between its markers."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{shown_scores(entries(), all_scores())}\n{END}{after}")


def all_scores() -> dict[str, dict[str, Score]]:
    """Return the scores of each detector by entry, ours first."""
    names = sorted((path.stem for path in SCORES.glob("*.json")), key=lambda name: (name != OURS, name))
    return {name: read_scores(name) for name in names}


def shown_scores(museum: Sequence[Entry], scores: _Scores) -> str:
    """Return the scores in Markdown: sums, what only others catch, and a row for each entry."""
    late = [entry for entry in museum if entry.late]
    blocks = [_table(_sums([entry for entry in museum if not entry.late], scores))]
    if late:
        blocks += [
            f"The {len(late)} late entries, which somebody added who had not seen the code of `megalite-verify`, as it "
            "judged them before anything in it was changed for them:"
        ]
        blocks += [_table(_sums(late, scores))]
    blocks += ["### Caught by others alone", _caught_by_others(museum, scores)]
    blocks += ["### Entries", LEGEND.rstrip(), _table(_rows(museum, scores))]
    return "".join(f"{block}\n\n" for block in blocks).rstrip() + "\n"


def _sums(museum: Sequence[Entry], scores: _Scores) -> Iterator[Sequence[str]]:
    """Yield a heading, and a row for each detector."""
    yield "detector", "entries", "caught", "right tensor", "right hypothesis", "cannot tell", "right runs accused"
    for name, by_entry in scores.items():
        here = [by_entry[entry.name] for entry in museum if entry.name in by_entry]
        caught = [each for each in here if each.caught]
        counts = (
            len(here),
            len(caught),
            sum(each.is_tensor for each in caught),
            sum(each.is_hypothesis for each in caught),
            sum(each.verdict == "unknown" for each in here),
            sum(each.of_right == "wrong" for each in here),
        )
        yield _shown_name(name), *map(str, counts)


def _caught_by_others(museum: Sequence[Entry], scores: _Scores) -> str:
    """Return what others catch and `megalite-verify` does not, as a list."""
    lines = []
    for entry in museum:
        catchers = [name for name, found in scores.items() if entry.name in found and found[entry.name].caught]
        if catchers and OURS not in catchers and entry.name in scores.get(OURS, {}):
            lines.append(f"- {entry.title} (`{entry.name}`): {', '.join(map(_shown_name, catchers))}")
    return "\n".join(lines) or "Nothing."


def _rows(museum: Sequence[Entry], scores: _Scores) -> Iterator[Sequence[str]]:
    """Yield a heading, and a row for each entry."""
    yield "bug", "program", "reported", *map(_shown_name, scores)
    for entry in museum:
        program = f"{entry.program}, as it is" if entry.is_real else entry.program
        late = " (late)" if entry.late else ""
        cells = (_marks(found.get(entry.name)) for found in scores.values())
        yield f"{entry.title}{late}".replace("|", "\\|"), program, ", ".join(map(_link, entry.reported)), *cells


def _marks(score: Score | None) -> str:
    if score is None:
        return ""
    if score.of_right == "wrong":
        return "!"
    if not score.caught:
        return "?" if score.verdict == "unknown" else "–"
    return f"c{'t' if score.is_tensor else ''}{'h' if score.is_hypothesis else ''}"


def _link(reported: str) -> str:
    found = re.fullmatch(r"([\w.-]+/([\w.-]+))#(\d+)", reported)
    return f"[{found[2]}#{found[3]}](https://github.com/{found[1]}/issues/{found[3]})" if found else reported


def _shown_name(detector: str) -> str:
    return "megalite-verify" if detector == OURS else detector


def _table(rows: Iterator[Sequence[str]]) -> str:
    heading, *others = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *others))

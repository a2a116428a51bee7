"""The page of a verification: HTML without scripts and other files, for a phone and a screen, light and dark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from megalite.atomic_files import write_atomically
from megalite.extras.report.page import style
from megalite.extras.report.tables import as_text, details, table
from megalite.extras.verify.judgement import LIMIT, Judgement
from megalite.extras.verify.pictures import PHASES, ROLES, brief, by_order, by_rank, ratio_of
from megalite.extras.verify.trace import LAST
from megalite.extras.verify.verdict import RIGHT, UNKNOWN, WRONG, Verdict, shown_name, shown_ranks, shown_ratio
from megalite.process.output import printable
from megalite.svg import page as html_page

_STYLE = """
.verdict{font-size:1.15em;max-width:75em;border-left:6px solid;border-radius:8px;padding:10px 14px;margin:12px 0;
background:var(--box)}
.verdict b{margin-right:.4em}
.right{border-color:var(--c2)}.right b{color:var(--c2)}
.wrong{border-color:var(--bad)}.wrong b{color:var(--bad)}
.unknown{border-color:var(--grey)}.unknown b{color:var(--grey)}
.wide svg{min-width:760px}
"""
_WORDS = {RIGHT: "right", WRONG: "wrong", UNKNOWN: "unknown"}
MOST_LINES, MOST_LETTERS = 200, 2000
"""Lines of a list or a table, and letters of a line, as far as they follow from what others have written."""


def write_page(verdict: Verdict, path: Path, *, title: str, facts: Sequence[tuple[str, str]]) -> None:
    """Write the page of a verdict. `facts`: names and texts on what was verified.

    Raises FileError if the file cannot be written.
    """
    write_atomically(path, page(verdict, title, facts).encode())


def page(verdict: Verdict, title: str, facts: Sequence[tuple[str, str]]) -> str:
    """Return the page of a verdict."""
    word = _WORDS[verdict.exit_code]
    body = [
        f"<header><h1>{as_text(title)}</h1></header><main>",
        f"<p class='verdict {word}'><b>{word.capitalize()}.</b>{as_text(verdict.line[:MOST_LETTERS])}</p>",
        _numbers(verdict),
        table([], facts) if facts else "",
        _first(verdict),
        _list("What else differs", verdict.further),
        _list("What to turn off next", verdict.next_flags),
        _pictures(verdict),
        _figures(verdict),
        _by_layer(verdict.judgements),
        _skipped(verdict),
        _list("Notes", list(dict.fromkeys(verdict.notes))),
        "<p class='grey'>Made by megalite-verify, whose --json has every number.</p></main>",
    ]
    return html_page(printable(f"{title}: {word}"), style() + _STYLE, "\n".join(filter(None, body)), "light dark")


def _numbers(verdict: Verdict) -> str:
    """Return what was compared, in a few numbers."""
    ratios = sorted(map(ratio_of, verdict.judgements))
    if not ratios:
        return ""
    differing = sum(each.differs for each in verdict.judgements)
    shown = {
        "tensors compared": f"{len(ratios):,}",
        "differ": f"{differing:,}",
        "ranks": f"{len({each.entry.rank for each in verdict.judgements}):,}",
        "median, times rounding": shown_ratio(ratios[len(ratios) // 2]),
        "largest, times rounding": shown_ratio(ratios[-1]),
        "limit, times rounding": f"{LIMIT:g}",
    }
    items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in shown.items())
    return f"<dl class='facts'>{items}</dl>"


def _first(verdict: Verdict) -> str:
    """Return the first tensor that differs, and the hypotheses on it."""
    if (first := verdict.first) is None:
        return ""
    number = first.entry.micro_batch
    rows = [
        ("tensor", shown_name(first)),
        ("layer", "in none" if first.layer is None else str(first.layer)),
        ("ranks", shown_ranks(verdict.ranks)),
        *([("micro-batch", "the last one" if number == LAST else str(number))] if first.point is not None else []),
        ("distance from the truth", f"{first.distance:.3g}{_share(first.distance, first.norm)}"),
        ("what rounding explains", f"{first.rounding:.3g}{_share(first.rounding, first.norm)}"),
        ("ratio", f"{shown_ratio(ratio_of(first))} (limit: {LIMIT:g})"),
        ("source", first.entry.source),
    ]
    header = ["", "kind", "what the program seems to have computed", "left, times rounding"]
    found = [
        ["explains it" if each.explains else "does not", each.kind, each.text, shown_ratio(each.ratio)]
        for each in verdict.hypotheses[:MOST_LINES]
    ]
    none = "<p>No hypothesis comes near: what was computed there is none of the mistakes that are known.</p>"
    return (
        f"<h2>The first tensor that differs</h2>{table([], rows)}<h2>Hypotheses</h2>"
        f"{table(header, found) if found else none}"
    )


def _share(value: float, norm: float) -> str:
    return f" ({value / norm:.2g} of the norm)" if norm else ""


def _pictures(verdict: Verdict) -> str:
    if not verdict.judgements:
        return ""
    present = {PHASES[each.entry.role] for each in verdict.judgements}
    phases = [phase for phase in dict.fromkeys(PHASES.values()) if phase in present]
    maps = "".join(f"<figure>{by_rank(verdict, phase)}</figure>" for phase in phases)
    return (
        f"<h2>In the order of execution</h2><figure class='wide scroll' tabindex='0'>{by_order(verdict)}</figure>"
        f"<h2>By layer and rank</h2><div class='charts'>{maps}</div>"
    )


def _figures(verdict: Verdict) -> str:
    """Return the table of the figures of the step beside what they should be."""
    header = ["", "recorded", "should be", "rounding", "times rounding", ""]
    rows = [
        [
            each.name,
            f"{each.recorded:.8g}",
            f"{each.expected:.8g}",
            f"\u00b1 {each.tolerance:.2g}",
            shown_ratio(each.ratio),
            "differs" if each.differs else "right",
        ]
        for each in verdict.figures[:MOST_LINES]
    ]
    return f"<h2>Figures of the step</h2>{table(header, rows)}" if rows else ""


def _by_layer(judgements: Iterable[Judgement]) -> str:
    """Return the table of the worst tensor of each layer and role."""
    groups: dict[tuple[bool, int, int], list[Judgement]] = defaultdict(list)
    roles = list(ROLES)
    for each in judgements:
        groups[each.layer is None, each.layer or 0, roles.index(each.entry.role)].append(each)
    rows = []
    for _, group in sorted(groups.items(), key=lambda item: item[0]):
        worst = max(group, key=ratio_of)
        rows.append(
            [
                "none" if worst.layer is None else str(worst.layer),
                ROLES[worst.entry.role],
                f"{len(group):,}",
                shown_ratio(ratio_of(worst)) + (" differs" if worst.differs else ""),
                f"{worst.relative:.2g}",
                f"{worst.rounding / worst.norm:.2g}" if worst.norm else "",
                f"{brief(worst.entry.name)}, rank {worst.entry.rank}",
            ]
        )
    header = ["layer", "role", "tensors", "largest ratio", "its distance", "its rounding", "its tensor"]
    after = "<p class='grey'>Distance and rounding are relative to the norm of the tensor.</p>"
    return details("By layer and role", header, rows, after)


def _skipped(verdict: Verdict) -> str:
    ordered = sorted(verdict.skipped.items(), key=lambda each: -each[1])
    rows = [[f"{count:,}", reason] for reason, count in ordered[:MOST_LINES]]
    left = f"<p class='grey'>and {len(ordered) - MOST_LINES:,} more reasons</p>" if len(ordered) > MOST_LINES else ""
    return details(f"Not compared: {sum(verdict.skipped.values()):,} tensors", ["tensors", "why"], rows, left)


def _list(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{as_text(line[:MOST_LETTERS])}</li>" for line in lines[:MOST_LINES])
    more = f"<li>and {len(lines) - MOST_LINES:,} more</li>" if len(lines) > MOST_LINES else ""
    return f"<h2>{title}</h2><ul class='findings'>{items}{more}</ul>"

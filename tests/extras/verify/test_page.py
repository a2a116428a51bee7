"""The page of a verification shows what differs first, stays small, and has what others have written as text alone."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from megalite.extras.verify.compare import first_difference
from megalite.extras.verify.evidence import Whole
from megalite.extras.verify.judgement import LIMIT, Judgement, compare
from megalite.extras.verify.page import page, write_page
from megalite.extras.verify.pictures import PHASES, by_order, by_rank
from megalite.extras.verify.points import Point
from megalite.extras.verify.suspect import Hypothesis
from megalite.extras.verify.trace import OF_MODULES, Entry, Role
from megalite.extras.verify.verdict import Figure, Verdict
from tests.extras.report.test_page import HOSTILE, is_inert

pytestmark = pytest.mark.extra
FORWARD: tuple[Role, ...] = ("input", "output")
BACKWARD: tuple[Role, ...] = ("output_gradient", "input_gradient")


def judged(
    recorded: float, *, name: str = "decoder.layers.1.mlp", role: Role = "output", layer: int | None = 1, rank: int = 0
) -> Judgement:
    """Judge four recorded numbers that should be 1. Rounding explains an error of 1e-3 in each."""
    values = Whole(torch.full((4,), recorded, dtype=torch.float64))
    entry = Entry(rank, name, role, (4,), f"rank_{rank}.pt: {name}", lambda: values)
    truth = torch.ones(4, dtype=torch.float64)
    point = Point(name, role) if role in OF_MODULES else None
    return Judgement(entry, point, layer, 0, *compare(values, [truth, truth + 1e-3]))


def in_order(layers: int) -> Iterator[tuple[str, Role, int | None]]:
    """Yield the tensors of a step."""
    names = [(f"decoder.layers.{layer}.{part}", layer) for layer in range(layers) for part in ("norm", "mlp")]
    yield from ((f"{name}.weight", "parameter", layer) for name, layer in names)
    yield "embedding", "output", None
    yield from ((name, role, layer) for name, layer in names for role in FORWARD)
    yield from ((name, role, layer) for name, layer in reversed(names) for role in BACKWARD)
    yield from ((f"{name}.weight", "gradient", layer) for name, layer in reversed(names))


def verdict(errors: Mapping[tuple[str, Role], float], *, layers: int = 4, ranks: Sequence[int] = (0,)) -> Verdict:
    """Return the verdict of a step, most of whose tensors have the error of rounding.

    `errors`: of other ones, each on the last rank alone.
    """
    judgements = [
        judged(1 + (errors.get((name, role), 1e-3) if rank == ranks[-1] else 1e-3), name=name, role=role, layer=layer,
               rank=rank)
        for name, role, layer in in_order(layers)
        for rank in ranks
    ]  # fmt: skip
    first = first_difference(judgements)
    return Verdict(judgements, first, () if first is None else (first.entry.rank,))


def svgs(text: str) -> list[ElementTree.Element]:
    """Return the pictures of a page, each parsed as XML."""
    return [ElementTree.fromstring(each) for each in re.findall(r"<svg .*?</svg>", text, re.DOTALL)]


def dots(svg: str) -> list[tuple[float, float, str]]:
    """Return x, y and the words of the dots of a picture."""
    found = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}circle")
    return [(float(each.attrib["cx"]), float(each.attrib["cy"]), each[0].text or "") for each in found if len(each)]


def test_the_page_says_what_differs_first_and_why(tmp_path: Path) -> None:
    found = verdict({("decoder.layers.2.mlp", "output"): 0.5}, ranks=(0, 1))
    found = Verdict(
        found.judgements,
        found.first,
        found.ranks,
        [Hypothesis("factor", "it is 1.5 times what it should be", 0.2), Hypothesis("sum", "axis tp is missing", 70.0)],
        [Figure("loss", 2.5, 2.0, 0.001)],
        skipped={"rotary has no counterpart": 3},
        notes=["dropout is left out"],
    )
    write_page(found, tmp_path / "page.html", title="Step 7", facts=[("command", "train.sh")])
    text = (tmp_path / "page.html").read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    assert is_inert(text)
    for shown in (
        "<b>Wrong.</b>output of decoder.layers.2.mlp (layer 2) on rank 1 is the first tensor that differs",
        "<td>500 (limit: 4)</td>",
        "<td>rank_1.pt: decoder.layers.2.mlp</td>",
        "<td>explains it</td><td>factor</td><td>it is 1.5 times what it should be</td><td>0.2</td>",
        "<td>does not</td><td>sum</td><td>axis tp is missing</td><td>70</td>",
        "<td>loss</td><td>2.5</td><td>2</td><td>± 0.001</td><td>500</td><td>differs</td>",
        "<td>rotary has no counterpart</td>",
        "<li>dropout is left out</li>",
        "<td>train.sh</td>",
    ):
        assert shown in text


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (verdict({}), "right"),
        (verdict({("embedding", "output"): 1.0}), "wrong"),
        (Verdict([], None, figures=[Figure("loss", 2.0, 2.0, 0.0)]), "right"),
        (Verdict([], None, further=["the update is of another optimizer"]), "wrong"),
        (Verdict([], None), "unknown"),
    ],
)
def test_the_line_has_the_colour_of_the_verdict(found: Verdict, word: str) -> None:
    text = page(found, "Step 7", [])
    assert f"<p class='verdict {word}'><b>{word.capitalize()}.</b>" in text
    assert is_inert(text)


def test_dots_are_in_the_order_of_execution_and_as_high_as_their_ratios() -> None:
    """Tensors that differ are alone above the limit, and later ones are further right."""
    wrong: dict[tuple[str, Role], float] = {
        ("decoder.layers.2.mlp", "output"): 0.01,
        ("decoder.layers.1.norm", "input_gradient"): 0.1,
    }
    found = verdict(wrong)
    svg = by_order(found)
    drawn = dots(svg)
    assert len(drawn) == len(found.judgements)
    places = {words.split(":")[0]: (x, y) for x, y, words in drawn}
    order = [
        "parameter decoder.layers.0.norm.weight",
        "output of embedding",
        "input of decoder.layers.0.norm",
        "output of decoder.layers.3.mlp",
        "output gradient of decoder.layers.3.mlp",
        "input gradient of decoder.layers.0.norm",
        "gradient of decoder.layers.0.norm.weight",
    ]
    assert [places[each][0] for each in order] == sorted(places[each][0] for each in order)
    high = sorted((y, words) for _, y, words in drawn)
    assert [words.split(":")[0] for _, words in high[:2]] == [
        "input gradient of decoder.layers.1.norm",
        "output of decoder.layers.2.mlp",
    ]
    decade = high[1][0] - high[0][0]
    assert high[2][0] - high[1][0] == pytest.approx(decade, abs=0.02)  # 100, 10 and 1; places have two decimals
    assert svg.count("first: output of decoder.layers.2.mlp") == 1


def test_a_rank_that_differs_has_a_dot_of_its_own() -> None:
    found = verdict({("decoder.layers.2.mlp", "output"): 0.5}, ranks=range(8))
    drawn = [words for _, _, words in dots(by_order(found)) if words.startswith("output of decoder.layers.2.mlp:")]
    assert sorted(drawn) == [
        "output of decoder.layers.2.mlp: layer 2, rank 0, 1 times rounding\nand 6 more that lie here",
        "output of decoder.layers.2.mlp: layer 2, rank 7, 500 times rounding",
    ]


@pytest.mark.parametrize("error", [math.inf, math.nan, 1e300, 1e308])
def test_ratios_without_end_are_drawn_within_the_picture(error: float) -> None:
    found = verdict({("decoder.layers.2.mlp", "output"): error, ("decoder.layers.3.mlp", "output"): 0.5})
    for root in svgs(page(found, "Step 7", [])):
        for each in root.iter():
            numbers = re.findall(
                r"[\d.]+|nan|inf", " ".join(each.get(name, "") for name in ("cx", "cy", "d", "x", "y"))
            )
            assert all(0 <= float(number) <= 1000 for number in numbers)
    places = {words.split(":")[0]: y for _, y, words in dots(by_order(found))}
    assert 0 < places["output of decoder.layers.2.mlp"] < places["output of decoder.layers.3.mlp"]


def test_a_rounding_of_zero_makes_an_infinite_ratio_and_has_a_page() -> None:
    step = Judgement(judged(2.0).entry, None, None, 0, 1.0, 0.0, 1.0, 0.0)
    assert step.ratio == math.inf
    text = page(Verdict([step], step, [0]), "Step 7", [])
    assert "\u221e" in text
    assert svgs(text)


def test_the_map_has_the_largest_ratio_of_each_layer_and_rank() -> None:
    found = verdict({("decoder.layers.2.mlp", "output"): 0.5}, ranks=range(8))
    root = ElementTree.fromstring(by_rank(found, "forward"))
    titles = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}title")][1:]
    assert len(titles) == 8 + 4 * 8  # the embedding is in no layer, and on all ranks here
    assert [each for each in titles if ": layer 2, rank 7, 500 times" in each] == [
        "output of decoder.layers.2.mlp: layer 2, rank 7, 500 times rounding"
    ]


def test_what_others_have_written_is_text(tmp_path: Path) -> None:
    first = judged(2.0, name=f"{HOSTILE}\x00]]>", rank=3)
    assert first.differs
    found = Verdict(
        [judged(1.001, name=HOSTILE), first],
        first,
        [3],
        [Hypothesis(HOSTILE, HOSTILE, 1.0)],
        [Figure(HOSTILE, math.nan, -math.inf, 0.0)],
        [HOSTILE],
        {HOSTILE: 1},
        [HOSTILE],
        [HOSTILE],
    )
    write_page(found, tmp_path / "page.html", title=HOSTILE, facts=[(HOSTILE, HOSTILE)])
    text = (tmp_path / "page.html").read_text()
    assert is_inert(text)
    assert not set(re.findall("[\x00-\x08\x0e-\x1f\x7f-\x9f\u202a-\u202e]", text))
    assert len(svgs(text)) == 2


def test_a_name_without_end_does_not_fill_the_page() -> None:
    long = judged(2.0, name="layers." * 100_000)
    found = Verdict([long], long, [0], skipped={f"{number} {'x' * 100}": 1 for number in range(50_000)})
    text = page(found, "Step 7", [])
    assert "and 49,800 more reasons" in text
    assert len(text) < 1_000_000


def test_ten_thousand_ranks_have_a_small_page() -> None:
    """Maps have at most 64 columns and 128 rows, and dots that lie on each other are one."""
    entries = {
        (name, role, layer): judged(1.001, name=name, role=role, layer=layer) for name, role, layer in in_order(1)
    }
    judgements = []
    for number, ((name, role, layer), like) in enumerate(entries.items()):
        for rank in range(10_000):
            distance = like.rounding * 10.0 ** (-1 + 4 * ((7919 * rank + number) % 997) / 997)  # from 0.1 to 1000
            entry = Entry(rank, name, role, (4,), "rank", like.entry.read)
            judgements.append(Judgement(entry, like.point, layer, number, distance, like.rounding, 1.0, like.norm))
    found = Verdict(judgements, first_difference(judgements), range(10_000))
    start = time.monotonic()
    text = page(found, "Step 7", [])
    assert time.monotonic() - start < 30  # 1 s on an idle core
    assert len(text) < 2_000_000
    columns = {each.get("x") for each in svgs(text)[2].iter("{http://www.w3.org/2000/svg}rect") if each.get("x")}
    assert 60 <= len(columns) <= 64 + 6  # with the legend's
    assert "ranks 0-156" in text or "rank 0" in text


def test_a_thousand_layers_share_rows() -> None:
    found = verdict({}, layers=1000)
    for phase in ("forward", "backward", "gradients of weights"):
        root = ElementTree.fromstring(by_rank(found, phase))
        assert len(list(root.iter("{http://www.w3.org/2000/svg}title"))) - 1 <= 128
    assert len(page(found, "Step 7", [])) < 2_000_000


def test_each_role_has_a_phase_and_the_limit_is_drawn() -> None:
    roles: tuple[Role, ...] = tuple(PHASES)
    found = Verdict([judged(1.001, role=role) for role in roles], None)
    svg = by_order(found)
    for phase in set(PHASES.values()):
        assert f">{phase}</text>" in svg
    assert f"limit: {LIMIT:g}" in svg

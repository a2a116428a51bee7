"""The page in a real browser: readable on a phone and a screen, light and dark, and without anything that runs."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from megalite.extras.report.page import page
from megalite.extras.report.recorded import read_run
from tests.extras.report.runs import step, validation, write_run
from tests.extras.report.test_page import HOSTILE

pytestmark = pytest.mark.report
PHONE = {"width": 390, "height": 844}
SCREEN = {"width": 1400, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    assert program, "chromium is not installed: apt-get install chromium (.ci/run does)"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return pages of runs by name."""
    folder = tmp_path_factory.mktemp("pages")
    chance = random.Random(0)
    layers = {f"max_expert_load/layer {number}": 1.0 for number in range(12)}
    lines = [
        step(number, lm_loss=8 * number**-0.2 + chance.gauss(0, 0.05), grad_norm=abs(chance.gauss(1, 0.2)),
             skipped=number == 100, **{key: value + chance.random() for key, value in layers.items()})
        for number in range(1, 601)
    ]  # fmt: skip
    lines += [validation(number, 8 * number**-0.2 + 0.1) for number in range(100, 601, 100)]
    config = "training:\n  train_iters: 600\n  lr: 0.1\n"
    long = write_run(folder / "long", lines, config=config, ledger=[{"step": 50, "kind": "late", "why": "rank 3"}])
    other = write_run(folder / "other", lines[:300], config=config.replace("0.1", "0.2"))
    text = {"iteration": 2, "consumed_samples": 20, "consumed_tokens": 2000, "sample": f"{HOSTILE}\n{'long' * 300}"}
    figures = {HOSTILE: 1.0, f"consumed_tokens/{HOSTILE}": 1.0, f"wait_s/{HOSTILE}": 1.0}
    hostile = write_run(
        folder / "hostile",
        [step(1, **figures), step(2, **{key: 2 * value for key, value in figures.items()}), text],
        config=f"a:\n  b: {HOSTILE!r}\n",
    )
    empty = write_run(folder / "empty", [])
    diverged = write_run(folder / "diverged", [step(1), *(step(number, lm_loss="NaN") for number in range(2, 9))])
    groups = {"long": [long], "two": [long, other], "hostile": [hostile], "empty": [empty], "diverged": [diverged]}
    for name, runs in groups.items():
        (folder / f"{name}.html").write_text(page([read_run(str(run)) for run in runs]))
    return {name: folder / f"{name}.html" for name in groups}


def opened(browser: Any, path: Path, size: dict[str, int], scheme: Literal["light", "dark"] = "light") -> Any:
    tab = browser.new_page(viewport=size, color_scheme=scheme)
    tab.said = []
    tab.on("console", lambda message: tab.said.append(message.text))
    tab.on("pageerror", lambda error: tab.said.append(str(error)))
    tab.on("request", lambda request: tab.said.append(request.url))
    tab.goto(path.as_uri())
    return tab


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["long", "two", "hostile", "empty", "diverged"])
def test_axe_finds_nothing_serious(
    name: str, scheme: Literal["light", "dark"], browser: Any, pages: dict[str, Path]
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    tab = opened(browser, pages[name], SCREEN, scheme)
    for closed in tab.query_selector_all("details:not([open]) > summary"):
        closed.click()
    found = Axe().run(tab).response["violations"]
    tab.close()
    assert [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")] == []


@pytest.mark.parametrize("name", ["long", "two", "hostile", "empty", "diverged"])
def test_a_phone_shows_all_of_its_width_and_nothing_runs_or_is_loaded(
    name: str, browser: Any, pages: dict[str, Path]
) -> None:
    tab = opened(browser, pages[name], PHONE)
    assert tab.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert tab.evaluate("document.scripts.length") == 0
    assert tab.said == [pages[name].as_uri()]
    assert "megalite report" in tab.title()
    tab.close()


def test_the_switch_shows_one_unit(browser: Any, pages: dict[str, Path]) -> None:
    tab = opened(browser, pages["long"], SCREEN)
    for unit in ("steps", "tokens", "hours"):
        tab.click(f"label[for=over-{unit}]")
        shown = {each for each in ("steps", "tokens", "hours") if tab.is_visible(f"figure .{each}")}
        assert shown == {unit}
    tab.close()


def test_the_curve_of_the_loss_falls_within_its_chart(browser: Any, pages: dict[str, Path]) -> None:
    """It begins at the upper left, ends at the lower right, and leaves the chart nowhere."""
    tab = opened(browser, pages["long"], SCREEN)
    line, chart = (
        tab.evaluate(f"(() => {{ const b = document.querySelector('{which}').getBoundingClientRect();"
                     "return [b.left, b.top, b.right, b.bottom]; })()")
        for which in ("figure .steps path.c0", "figure .steps svg")
    )  # fmt: skip
    ends = tab.evaluate(
        "(() => { const p = document.querySelector('figure .steps path.c0'); const n = p.getTotalLength();"
        "const a = p.getPointAtLength(0), b = p.getPointAtLength(n); return [a.x, a.y, b.x, b.y]; })()"
    )
    tab.close()
    assert all(math.isfinite(value) for value in line)
    assert chart[0] <= line[0] < line[2] <= chart[2]
    assert chart[1] <= line[1] < line[3] <= chart[3]
    assert ends[0] < ends[2]
    assert ends[1] < ends[3]

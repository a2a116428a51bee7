"""Every step of docs/parallel_layers.md computes what the plain model does, in one process and on two ranks."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

TEXT = (Path(__file__).parents[2] / "docs/parallel_layers.md").read_text()


def run_page(text: str) -> tuple[int, int, str]:
    """Run the examples; return how many failed and were tried, and the report."""
    page = doctest.DocTestParser().get_doctest(text, {"__name__": "page"}, "parallel_layers.md", None, 0)
    runner, report = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), list[str]()
    runner.run(page, out=report.append)
    return runner.failures, runner.tries, "".join(report)


@pytest.mark.parametrize("ranks", wide_except([1, 2], [2]))
def test_the_steps_of_the_page_compute_what_the_plain_model_does(ranks: int, rank_pools: RankPools) -> None:
    assert TEXT.count("= 1, 16, 4,") == 1
    for failed, tried, report in rank_pools(ranks).run(run_page, TEXT.replace("= 1, 16, 4,", f"= {ranks}, 16, 4,")):
        assert not failed, report
        assert tried > 40

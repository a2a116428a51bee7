"""Cases of Megatron-LM's functional tests whose memory is measured, and the page on them."""

from __future__ import annotations

import re

from benchmarks.planner.measured_memory import measured, rows
from benchmarks.planner.validate_memory import PAGE, found_by, line


def test_each_row_is_compared_or_has_a_reason() -> None:
    cases, reasons = measured()
    assert len(cases) + len(reasons) == len(rows())
    assert len(cases) > 150
    page = PAGE.read_text()
    assert f"Of {len(rows())} rows, {len(cases)} are compared" in page
    for reason in reasons.values():
        assert f"| {reason} |" in page
    for case in cases:
        assert f"| {case.name} | {case.gpu} | {case.gpus} |" in page


def test_the_page_has_what_a_dry_run_finds() -> None:
    name = "gpt/gpt3_mcore_te_tp2_pp2_cp2_calculate_per_token_loss"
    (found,) = found_by([case for case in measured()[0] if (case.name, case.gpu) == (name, "H100-SXM")])
    assert f"| {' | '.join(line(found))} |" in PAGE.read_text()
    assert abs(found.static_error) < 0.02


def test_medians_of_static_memory_are_within_two_percent() -> None:
    """The first row counts all cases, the others those of one kind."""
    text = PAGE.read_text().split("## Static memory")[1].split("## ")[0]
    medians = {
        name: float(share) for name, share in re.findall(r"^\| ([^|]+) \| \d+ \| ([\d.]+)% ", text, re.MULTILINE)
    }
    assert medians["all"] <= 2
    assert medians["Transformer Engine's layers"] <= 1

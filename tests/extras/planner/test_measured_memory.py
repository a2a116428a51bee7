"""Cases of Megatron-LM's functional tests whose memory is measured, and the page on them."""

from __future__ import annotations

import pytest

from benchmarks.planner.measured_memory import measured, rows
from benchmarks.planner.validate_memory import PAGE, found_by, layers_of, line
from tests.harness.wide import wide_except

ONE_OF_EACH_KIND = {
    "Transformer Engine's layers": ("gpt/gpt3_mcore_te_tp2_pp2_cp2_calculate_per_token_loss", 0.02),
    "Megatron-LM's own layers": (
        "gpt/gpt3_mcore_tp1_pp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce_param_gather",
        0.01,
    ),
    "layers with experts": ("moe/gpt3_mcore_tp2_pp2_ep2_te_4experts2parallel", 0.06),
    "layers with experts, grouped products": (
        "moe/gpt3_mcore_te_tp2_zp_z3_resume_torch_dist_te_8experts2parallel_top2router",
        0.02,
    ),
    "patterns with Mamba-2": ("hybrid/hybrid_mr_mcore_te_tp1_pp1_cp1_dgx_a100_1N8G", 0.005),
    "Muon": ("moe/gpt3_moe_mcore_te_ep8_resume_torch_dist_muon", 0.04),
}
"""Name of a case on H100 by whose layers it has, and by how much its static memory may be off."""
OF_A_SECOND = ("Transformer Engine's layers", "Megatron-LM's own layers")


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


@pytest.mark.parametrize("layers", wide_except(ONE_OF_EACH_KIND, OF_A_SECOND))
def test_a_dry_run_finds_what_was_measured_and_is_on_the_page(layers: str) -> None:
    name, tolerance = ONE_OF_EACH_KIND[layers]
    (found,) = found_by([case for case in measured()[0] if (case.name, case.gpu) == (name, "H100-SXM")])
    assert layers_of(found.case) == layers
    assert abs(found.static_error) < tolerance
    assert f"| {' | '.join(line(found))} |" in PAGE.read_text()

"""The benchmark of sites: its arithmetic, and what it says where it cannot run."""

from __future__ import annotations

import pytest

from benchmarks import sites


def test_the_time_is_that_of_the_steps_until_the_mean_loss_is_reached() -> None:
    records = [{"lm_loss": 6.0 - 0.1 * step, "iteration_time_s": 0.5} for step in range(20)]
    figures = sites.time_to(5.0, records, [19, 38])
    assert (figures.steps, figures.seconds, figures.median_step) == (16, 8.0, 0.5)
    assert figures.kernel_bytes_a_step == 3.0
    assert sites.time_to(1.0, records, [0, 0]).seconds is None


def test_a_missing_program_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "PROGRAMS", ("no-such-program",))
    with pytest.raises(SystemExit, match=r"^benchmarks.sites needs no-such-program: install iproute2"):
        sites.require_rights()


def test_missing_rights_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "PROGRAMS", ())
    monkeypatch.setattr(sites, "MAKE_SPACE", ("sh", "-c", "echo not permitted >&2; exit 1"))
    with pytest.raises(SystemExit, match=r"^benchmarks.sites needs root, .* in the kernel: not permitted$"):
        sites.require_rights()

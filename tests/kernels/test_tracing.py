"""torch.compile takes every operation whole, and of a layer all that is between its products and attention."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megalite_kernels.cases import cases

OUTSIDE = (
    "optimizer",
    "quantization",
    "dropout",
    "routing",
    "permutation",
    "grouped",
    "compression",
    "short_convolution",
    "recurrence",
)  # what no network runs, or has traced


@pytest.mark.wide  # imports torch anew, and its compiler
def test_no_operation_breaks_a_graph() -> None:
    """In a process of its own: Triton here is its interpreter, whose kernels cannot be traced.

    The graphs of a layer: the norm before attention, alone in the first layer and with an addition in others; the
    rotations; the norm before the feed-forward layer; its activation.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "tests.kernels.tracing"]
    traced = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert traced.returncode == 0, traced.stdout
    assert traced.stdout.endswith("layers: 5 graphs\n"), traced.stdout
    functions = {case.name.split()[0] for case in cases() if case.operation not in OUTSIDE}
    assert functions == {line.split()[0] for line in traced.stdout.splitlines() if line.split()[0] in functions}

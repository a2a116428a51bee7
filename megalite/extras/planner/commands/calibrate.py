"""Measure this machine's device for the planner, and write a cluster file for megalite-plan --cluster.

    python tools/calibrate.py --output mine.toml
    python tools/calibrate.py --output mine.toml --cluster H100-SXM --doctor doctor.json

It takes a minute: products of many sizes, element-wise kernels and attention, and on a CPU also steps of small
networks. On a CPU, run it with the threads of a rank: OMP_NUM_THREADS=1 under torchrun. Memory, a GPU's peaks and links
are those of --cluster; --doctor takes the links from a file of megalite-doctor --json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megalite.atomic_files import require_output, write_atomically
from megalite.config.tool_arguments import parse_tool_arguments
from megalite.errors import ConfigurationError
from megalite.lifecycle.failure import run_tool
from megalite.process.output import say
from megalite.small_files import read_small_file, reason


@dataclass(frozen=True)
class Arguments:
    """The flags."""

    output: str
    """The file to write."""
    cluster: str = "cpu"
    """Cluster or GPU whose memory, peaks and links the file takes over: a name of the planner's, or a file."""
    doctor: str | None = None
    """A file of megalite-doctor --json, whose links are taken over."""


def main() -> None:
    """Parse the flags, measure, and write the file."""
    arguments = parse_tool_arguments(Arguments, description=__doc__ or "")
    require_output("--output", arguments.output)
    from megalite.extras.planner.calibration import as_toml, calibrate
    from megalite.extras.planner.cluster import find_cluster, with_doctor

    cluster = find_cluster(arguments.cluster)
    if arguments.doctor is not None:
        try:
            links = json.loads(read_small_file(Path(arguments.doctor)))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"--doctor {arguments.doctor}: cannot be read as JSON: {reason(error)}") from None
        cluster = with_doctor(cluster, links)
    import torch

    if torch.cuda.is_available() == cluster.gpu.is_cpu:
        found = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        raise ConfigurationError(
            f"--cluster {arguments.cluster}: this machine has {found}: give the cluster of its device"
        )
    calibrated = calibrate(cluster)
    comment = f"measured by megalite-calibrate, torch {torch.__version__}, {torch.get_num_threads()} threads"
    write_atomically(Path(arguments.output), as_toml(calibrated, comment).encode())
    gpu = calibrated.gpu
    say(f"products   {max(gpu.peak.values()) * gpu.efficiency / 1e12:.3f} TFLOP/s for large ones")
    say(f"memory     {gpu.bandwidth * gpu.share / 1e9:.1f} GB/s in element-wise kernels")
    say(f"kernels    {gpu.kernel * 1e6:.1f} microseconds at least")
    say(f"written to {arguments.output}")


command = partial(run_tool, main)

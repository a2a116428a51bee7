"""Dry runs of offloading: what is on the host is told apart from the device, and what is copied is counted."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.extras.planner.dry_run import DryRun, dry_run
from megalite.extras.planner.dry_run_report import report
from megalite.extras.planner.host_tensor import HostTensor
from megalite.extras.planner.recording import Recorder
from megalite.offload.transfers import Transfers, make_transfers
from megalite.parallel.mesh import ParallelMesh
from megalite.tasks.summary import measured_memory
from megalite.training.data import open_data
from tests.extras.planner.test_dry_run import FLAGS
from tests.harness.gpt_trainer import gpt_trainer

META = torch.device("meta")
EIGHT = "--use-precision-aware-optimizer --exp-avg-dtype int8 --exp-avg-sq-dtype int8"
ZERO_3 = "--data-parallel-sharding-strategy optim_grads_params --parameter-offload"


def config(flags: str) -> list[str]:
    return f"{FLAGS} --num-layers 2 --micro-batch-size 2 --global-batch-size 2 {flags}".split()


def planned(flags: str, *, of_gpu: bool = False) -> DryRun:
    return dry_run(parse_arguments(config(flags)).config, 1, 0, of_gpu=of_gpu)


@pytest.mark.wide_except("--optimizer-offload-fraction 0.3 --bf16")
@pytest.mark.parametrize(
    "flags",
    [
        "--optimizer-offload-fraction 0.3 --bf16",
        f"--bf16 {EIGHT}",
        f"{ZERO_3} --overlap-cpu-optimizer-d2h-h2d",
        "--optimizer muon --optimizer-offload-fraction 0.5",
    ],
)
def test_a_dry_run_keeps_and_copies_what_a_run_does(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, found = planned("--bf16" * ("bf16" in flags)), planned(f"--optimizer-cpu-offload {flags}")
    copied: Counter[str] = Counter()
    run = resolve(parse_arguments(config(f"--optimizer-cpu-offload {flags}")).config, 1)
    trainer = gpt_trainer(run, open_data(run), ParallelMesh())
    memory = measured_memory(trainer, trainer.task)  # type: ignore[arg-type]
    monkeypatch.setattr(Transfers, "begun", staticmethod(lambda way, size: copied.update({way: size})))
    with trainer.loader:
        trainer.step(trainer.next_micro_batches())
    assert found.memory == memory
    assert 0 <= found.before - (memory.total - memory.activations) < 256  # single numbers of the optimizer's
    assert found.highest_on_host >= memory.host > 0
    assert not found.misplaced
    if "muon" not in flags:  # which copies its updates of whole matrices by itself
        assert copied["to device"] == found.total.host["to device"]
        assert copied["to host"] == found.total.host["to host"] - plain.total.host["to host"]


def test_an_update_on_the_host_is_no_launch() -> None:
    def updates(found: DryRun) -> int:
        return sum(times for each, times in found.total.operations.items() if "adamw" in each.name)

    assert updates(planned("")) > 0
    found = planned("--optimizer-cpu-offload")
    assert updates(found) == 0
    assert found.total.host["on the host"] == 4 * found.memory.parameters  # weights, gradients and both moments


def test_the_report_has_the_host_only_if_something_is_there() -> None:
    lines = list(report(planned("--optimizer-cpu-offload --bf16")))
    at = next(number for number, line in enumerate(lines) if line.startswith("on the host"))
    assert [line.split()[0] for line in lines[at + 1 : at + 3]] == ["copies", "operators"]
    assert not any("host  " in line or line.startswith("on the host") for line in report(planned("--bf16")))


def test_tensors_of_the_host_are_no_memory_of_the_device() -> None:
    with Recorder() as recorder:
        kept = make_transfers(META).on_host(1024, torch.float32)
        moment = torch.zeros_like(kept[:512], dtype=torch.int8)
        assert (recorder.alive, recorder.on_host) == (0, 4096 + 512)
        arrived = kept.to(META)
        assert (recorder.alive, recorder.total.host["to device"], recorder.total.launches) == (4096, 4096, 0)
        kept.copy_(arrived)
        assert (recorder.total.host["to host"], recorder.total.launches) == (4096, 0)
        kept.mul_(2.0)
        assert recorder.total.host["on the host"] > 0
        assert recorder.total.launches == 0
        del moment, arrived
        assert (recorder.alive, recorder.on_host, recorder.highest_on_host) == (0, 4096, 4608)
    assert isinstance(kept, HostTensor)


def test_an_operator_on_both_is_on_the_wrong_device() -> None:
    with Recorder() as recorder:
        kept, other = make_transfers(META).on_host(8, torch.float32), torch.zeros(8, device=META)
        kept + kept
        other + kept.sum()  # a single number may be on the host
        assert not recorder.misplaced
        assert (other + kept).is_meta
        assert recorder.misplaced.total() == 1

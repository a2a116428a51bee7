"""Runs whose ranks differ in recomputation and in the share of the state on the host: the plain runs, to the bit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.runs import LLAMA, Run, assert_same_checkpoint, metrics, words
from tests.harness.wide import wide_except

OWN = """flags = { recompute_granularity = "full", recompute_method = "uniform", recompute_num_layers = 1,
    optimizer_offload_fraction = 0.4 }""".replace("\n", "")
OFFLOADED = words("--optimizer-cpu-offload --optimizer-offload-fraction 0.0")
STEPS = words("--train-iters 4 --lr-decay-style constant --bf16")
LAYOUTS = {
    "dp2 zero 1": "--use-distributed-optimizer",
    "dp2 zero 2": "--data-parallel-sharding-strategy optim_grads --overlap-grad-reduce --overlap-param-gather",
    "dp3 zero 1": "--use-distributed-optimizer --global-batch-size 6",
    "pp2": "--pp 2",
    "pp2 overlapped": "--pp 2 --overlap-cpu-optimizer-d2h-h2d",
}


def classes(path: Path, *flags: str) -> Path:
    """Write a class of CPU cores for each rank, with these lines."""
    path.write_text(
        "\n".join(
            f'[class{number}]\ngpu = "cpu"\nnodes = 1\ngpus_per_node = 1\n{own}' for number, own in enumerate(flags)
        )
    )
    return path


def figure(text: str, name: str) -> float:
    found = re.search(rf"^\s*{name} +([\d.,]+) (\w+)", text, re.MULTILINE)
    assert found, text
    return float(found[1].replace(",", "")) * {"B": 1, "KiB": 2**10, "MiB": 2**20}.get(found[2], 2**10)


@pytest.mark.wide
@pytest.mark.parametrize("layout", wide_except(LAYOUTS, ["pp2"]))
@pytest.mark.parametrize("own", wide_except([0, 1], [1]))
def test_a_class_may_recompute_and_offload(layout: str, own: int, run: Run, tmp_path: Path) -> None:
    """I8 and I10 between ranks: metrics and checkpoints are those of the plain run, also after a resume."""
    share = "0.4" if own else "1.0"
    flags, ranks = [*LLAMA, *STEPS, *words(LAYOUTS[layout])], 3 if "dp3" in layout else 2
    plain = [flag for flag in flags if flag != "--overlap-cpu-optimizer-d2h-h2d"]
    run(*plain, "--hidden-dropout", 0.1, "--save", tmp_path / "plain", world_size=ranks)
    file = classes(
        tmp_path / "classes.toml", *("" if rank != own else OWN.replace("0.4", share) for rank in range(ranks))
    )
    mixed = [*flags, *OFFLOADED, "--hidden-dropout", 0.1, "--device-classes", file, "--save", tmp_path / "mixed"]
    shown = run(*mixed, "--exit-interval", 2, world_size=ranks, expected=85).stdout
    assert "1 x class0, 1 x class1" in shown
    run(*mixed, "--resume", "auto", world_size=ranks)
    assert metrics(tmp_path / "mixed") == metrics(tmp_path / "plain")
    assert_same_checkpoint(tmp_path / "mixed/iter_0000004", tmp_path / "plain/iter_0000004")


def test_the_run_has_the_configuration_without_the_flags_of_its_classes(run: Run, tmp_path: Path) -> None:
    """config.yaml and checkpoints have the run's flags and the text of the file, which is not needed again."""
    file = classes(tmp_path / "classes.toml", OWN, "")
    flags = [*LLAMA, *STEPS, *OFFLOADED, "--use-distributed-optimizer", "--device-classes", file]
    shown = run(*flags, "--save", tmp_path / "mixed", world_size=2).stdout
    found = yaml.safe_load((tmp_path / "mixed/config.yaml").read_text())
    assert found["parallel"]["device_classes"] == file.read_text()
    saved = json.loads((tmp_path / "mixed/iter_0000004/manifest.json").read_text())["config"]
    for config in (found, saved):
        assert config["training"]["recompute_granularity"] is None
        assert config["offload"]["optimizer_offload_fraction"] == 0.0
    other = classes(tmp_path / "classes.toml", "", OWN)
    plain = run(*flags[:-1], other, "--save", tmp_path / "other", world_size=2).stdout
    kept = [figure(text, "activations") for text in (shown, plain)]  # of rank 0
    assert kept[0] < 0.8 * kept[1]
    assert "  host" in shown
    assert "  host" not in plain
    file.unlink()
    run("--config", tmp_path / "mixed/config.yaml", "--train-iters", 5, "--resume", "auto", world_size=2)

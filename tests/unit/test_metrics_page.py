"""The table of the keys of metrics.jsonl, and README's look at one, are about what is written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from megalite.config.preferences import PreferenceConfig
from megalite.extras.post_training.preferences import loss_name
from megalite.model.head import LM_LOSS
from megalite.model.router import BALANCING_LOSSES, ENTROPY, Z_LOSS
from megalite.model.sparse_attention import INDEXER_LOSS
from megalite.modules.stage import LOSS
from megalite.run.timing import Timing
from megalite.training import metrics
from megalite.training.batches import BUSIEST
from megalite.training.metrics import MetricsWriter, StepMetrics, ValidationMetrics
from megalite.watchdog.sections import OF_A_STEP
from tests.harness.metrics_page import explained, undocumented

README = Path(__file__).parents[2] / "README.md"
TIMING = Timing([[1.0] * len(OF_A_STEP)] * 2, ["host"] * 2, {"tp": [0.0, 1.0]}, [1.0, 2.0])
OF_TERMS = {LM_LOSS.name, LOSS, Z_LOSS, ENTROPY, INDEXER_LOSS, *(loss.name for loss in BALANCING_LOSSES.values())}
OF_TERMS |= {"distill_loss", "rewards", *(loss_name(PreferenceConfig(preference_loss=each)) for each in ("dpo", "ipo"))}
SPEED = {"tokens_per_second": 1.0, "mfu": None}


def step(iteration: int, loss: float) -> StepMetrics:
    return StepMetrics(iteration, 4, 64, {"lm_loss": loss}, 1.0, 1e-3, 1.0, False, 0.5, SPEED, 1, 0)


def test_every_key_that_is_written_is_explained_and_no_other() -> None:
    kinds = StepMetrics, ValidationMetrics, metrics.TestMetrics, metrics.SampleMetrics
    written = {field.name for kind in kinds for field in fields(kind)} - {"losses", "throughput", "extra"}
    terms = OF_TERMS | {"valid_perplexity", "valid_bits_per_byte", "test_bits_per_byte"}
    written |= terms | metrics.ON_REQUEST | {BUSIEST, "wall_time"} | TIMING.figures().keys()
    parts = {key.split("/")[0] for key in explained() if "/" in key}
    assert undocumented(written - parts) == set()
    assert [key for key in explained() if "*" not in key and key.split("/")[0] not in written] == []
    assert [
        key for key in explained() if "/" in key and not metrics.is_figure(key) and key.split("/")[0] not in terms
    ] == []


def test_the_look_of_the_readme_prints_the_loss_of_steps_alone(tmp_path: Path) -> None:
    """The commands of README are run as they are by a wide test; this one is tried on lines of all kinds."""
    (command,) = re.findall(r"^python -c '(.*?)'.*?< (\S+)$", README.read_text(), re.MULTILINE | re.DOTALL)
    program, file = command
    assert file == "run/small-llama/metrics.jsonl"  # what `make train` leaves
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for record in (
            step(1, 2.005),
            ValidationMetrics(1, 4, 64, 3.0),
            step(2, 1.5),
            metrics.TestMetrics(2, 8, 128, 3.0),
        ):
            writer.write(record)
    with (tmp_path / "metrics.jsonl").open() as lines:
        shown = subprocess.run([sys.executable, "-c", program], stdin=lines, capture_output=True, check=True, text=True)
    assert json.loads(shown.stdout) == [2.0, 1.5]

"""Prometheus' own programs take the textfile and the rules, and the rules fire when they should."""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from megalite.errors import FileError
from megalite.extras.sinks import prometheus_textfile
from megalite.extras.sinks.description import Description
from megalite.extras.sinks.prometheus_textfile import PrometheusTextfile
from tests.extras.sinks.records import evaluation, step

ALERTS = Path(__file__).parents[3] / "examples" / "prometheus" / "alerts.yaml"
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool of Debian's prometheus")


def promtool(*arguments: object, text: str = "") -> str:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def textfile(folder: Path, name: str = "run") -> PrometheusTextfile:
    found = PrometheusTextfile(
        Description(("prometheus",), f"{folder}/{name}", 0, "reporting:\n  prometheus_textfile: null\n", 1)
    )
    found.open()
    return found


@needs_promtool
def test_promtool_has_no_complaint_about_the_textfile(tmp_path: Path) -> None:
    service = textfile(tmp_path, 'a "run"\\')
    more = {"max_expert_load/layer 1": 1.5, "grad_norm/all": 0.5, "memory_copy_s": 0.1}
    service.send([step(1), step(2, lm_loss=math.nan, skipped=True, grad_norm=-math.inf, **more), evaluation(2, 3.75)])
    text = (tmp_path / 'a "run"\\' / "metrics.prom").read_text()
    assert not promtool("check", "metrics", text=text)
    run = 'run="a \\"run\\"\\\\"'
    for line in (
        f"megalite_loss{{{run}}} NaN",
        f"megalite_grad_norm{{{run}}} -Inf",
        f'megalite_grad_norm{{{run},part="all"}} 0.5',
        f'megalite_max_expert_load{{{run},part="layer 1"}} 1.5',
        f"megalite_valid_loss{{{run}}} 3.75",
        f"megalite_skipped_steps_total{{{run}}} 1.0",
        f"megalite_consumed_tokens_total{{{run}}} 1024.0",
        f"megalite_running{{{run}}} 1.0",
    ):
        assert f"{line}\n" in text
    service.close(ended=True)
    assert f"megalite_running{{{run}}} 0.0\n" in (tmp_path / 'a "run"\\' / "metrics.prom").read_text()


def test_the_file_is_whole_at_any_time(tmp_path: Path) -> None:
    """A reader that has opened the file reads the old contents to their end."""
    service = textfile(tmp_path)
    path = tmp_path / "run" / "metrics.prom"
    with path.open() as old:
        service.send([step(1)])
        assert "megalite_iteration" not in old.read()
    assert "megalite_iteration" in path.read_text()
    assert [each.name for each in path.parent.iterdir()] == ["metrics.prom"]


def test_writes_that_fail_now_and_then_give_the_file_not_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = textfile(tmp_path)
    path, moved = tmp_path / "run", tmp_path / "moved"
    path.rename(moved)
    path.touch()  # no folder, for a while
    service.send([step(1)])
    path.unlink()
    moved.rename(path)
    service.send([step(2)])
    assert "megalite_iteration" in (path / "metrics.prom").read_text()
    monkeypatch.setattr(prometheus_textfile, "MOST_FAILURES", 1)
    path.rename(moved)
    path.touch()
    service.send([step(3)])
    with pytest.raises(FileError):
        service.send([step(4)])


@needs_promtool
def test_the_rules_fire(tmp_path: Path) -> None:
    promtool("check", "rules", ALERTS)
    run = '{run="a"}'

    def case(series: dict[str, str], minutes: int, *alerts: str) -> dict[str, object]:
        names = [rule["alert"] for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]]
        return {
            "interval": "1m",
            "input_series": [{"series": f"megalite_{name}{run}", "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)',
                    "eval_time": f"{minutes}m",
                    "exp_samples": [{"labels": "{}", "value": int(name in alerts)}],
                }
                for name in names
            ],
        }

    on = "1x120"
    falls = "100x60 50x60"
    cases = [
        case({"running": on, "last_step_timestamp_seconds": "0+60x120", "loss": "3x120"}, 100),
        case({"running": on, "last_step_timestamp_seconds": "0+60x20 1200x100"}, 30),
        case({"running": on, "last_step_timestamp_seconds": "0+60x20 1200x100"}, 60, "NoStep"),
        case({"running": "1x30 0x90", "last_step_timestamp_seconds": "0+60x20 1200x100"}, 60),
        case({"running": on, "skipped_steps_total": "0x20 0+1x100"}, 60, "StepsSkipped"),
        case({"running": on, "skipped_steps_total": "7x120"}, 60),
        case({"running": on, "loss": "3x20" + 100 * " NaN"}, 60, "LossNotFinite"),
        case({"running": on, "loss": "3x20" + 100 * " Inf"}, 60, "LossNotFinite"),
        case({"running": on, "tokens_per_second": falls}, 90, "ThroughputFell"),
        case({"running": on, "tokens_per_second": "100x120"}, 90),
    ]
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": cases}))
    promtool("test", "rules", tmp_path / "test.yaml")

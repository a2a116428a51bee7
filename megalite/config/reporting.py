"""Options of sinks: further places that get the records of metrics.jsonl while a run trains."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from megalite.config.checkpoint import is_url

SinkName = Literal["tensorboard", "wandb", "mlflow", "opentelemetry", "prometheus"]


@dataclass(frozen=True)
class ReportingConfig:
    """Options of sinks: where records go beside metrics.jsonl."""

    report_to: tuple[SinkName, ...] = ("tensorboard",)
    """Places that get the records of metrics.jsonl: any of tensorboard (files in the run directory), wandb, mlflow,
    opentelemetry, prometheus. tensorboard-dir, wandb-project, otel-enabled and prometheus-textfile add theirs."""
    wandb_project: str | None = None
    """Project at Weights & Biases; given, the run reports there."""
    wandb_exp_name: str | None = None
    """Name of the run at Weights & Biases; unset: Weights & Biases chooses one."""
    wandb_save_dir: str | None = None
    """Folder for the files of Weights & Biases; unset: wandb in the run directory."""
    wandb_entity: str | None = None
    """Team or user at Weights & Biases that the run belongs to."""
    otel_enabled: bool = False
    """Report to an OpenTelemetry collector, which OTEL_EXPORTER_OTLP_ENDPOINT names."""
    otel_service_name: str | None = None
    """Name of the service in OpenTelemetry; unset: that of OTEL_SERVICE_NAME, or megatron-training."""
    prometheus_textfile: str | None = None
    """File for node_exporter's textfile collector; unset: metrics.prom in the run directory, with report-to."""

    def reports(self, sink: SinkName) -> bool:
        """Tell whether records go there (for TensorBoard, `wanted` also looks for a folder)."""
        asked = {
            "wandb": bool(self.wandb_project),
            "opentelemetry": self.otel_enabled,
            "prometheus": self.prometheus_textfile is not None,
        }
        return sink in self.report_to or asked.get(sink, False)

    @property
    def services(self) -> tuple[SinkName, ...]:
        """Sinks other than TensorBoard's files."""
        return tuple(sink for sink in get_args(SinkName) if sink != "tensorboard" and self.reports(sink))

    def wanted(self, save: str | None, tensorboard_dir: str | None) -> tuple[SinkName, ...]:
        """Return the sinks of a run. TensorBoard's files need a folder: --tensorboard-dir or a --save on disk."""
        in_save = self.reports("tensorboard") and save is not None and not is_url(save)
        return (*(("tensorboard",) if tensorboard_dir or in_save else ()), *self.services)


def reporting_problems(reporting: ReportingConfig, save: str | None) -> Iterator[str]:
    """Yield a line for each relation that does not hold."""
    path = reporting.prometheus_textfile
    if path is None:
        if reporting.reports("prometheus") and (save is None or is_url(save)):
            yield "--report-to prometheus needs --prometheus-textfile FILE, or a --save that is a folder"
    elif is_url(path) or os.path.isdir(path) or not path.endswith(".prom"):
        yield f"--prometheus-textfile {path}: give a file whose name ends in .prom: node_exporter reads no other"
    folder = reporting.wandb_save_dir
    if folder is not None and is_url(folder):
        yield f"--wandb-save-dir {folder}: Weights & Biases appends to its files, which needs a folder"

"""OpenTelemetry: metrics under Megatron-LM's names, to a collector by OTLP."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from megalite.extras.sinks.background import Record
from megalite.extras.sinks.description import Description

GAUGES = {
    "lm_loss": ("megatron.training.loss", 1.0),
    "loss": ("megatron.training.loss", 1.0),
    "model_tflops_per_device": ("megatron.training.throughput_tflops", 1.0),
    "grad_norm": ("megatron.training.grad_norm", 1.0),
    "learning_rate": ("megatron.training.learning_rate", 1.0),
    "tokens_per_second": ("megatron.training.tokens_per_sec", 1.0),
    "peak_memory_bytes": ("megatron.training.memory_allocated_gb", 1e-9),
}
"""Keys of records with Megatron-LM's gauges, and the factor to their unit. Other keys are gauges `megalite.KEY`."""
STEP, SKIPPED = "megatron.training.step_duration_ms", "megatron.training.skipped_iters"
_ATTRIBUTES = {
    "tensor_model_parallel_size": "dl.tensor_parallel.size",
    "pipeline_model_parallel_size": "dl.pipeline_parallel.size",
    "global_batch_size": "dl.batch_size",
    "seq_length": "dl.sequence_length",
    "num_layers": "megatron.num_layers",
    "hidden_size": "megatron.hidden_size",
    "num_attention_heads": "megatron.num_attention_heads",
    "train_iters": "megatron.train_iters",
    "micro_batch_size": "megatron.micro_batch_size",
    "ckpt_format": "megatron.ckpt_format",
}
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_./-]")
_FAILURES = 5
"""Failed exports in a row after which the collector is left out. A collector that starts again is missed less long."""
_EXPORT_S = 10.0


class OpenTelemetryMeter:
    """Service that sends metrics to the collector of OTEL_EXPORTER_OTLP_ENDPOINT, the last value of each."""

    name = "opentelemetry"
    interval_s = 10.0

    def __init__(self, description: Description) -> None:
        self._description = description
        self._failures = 0
        self._provider: Any = None
        self._instruments: dict[str, Any] = {}

    def open(self) -> None:
        """Make the meter, with the configuration as attributes of its resource."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import MetricExportResult, PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # failures are counted, and told once
        exporter: Any = OTLPMetricExporter(timeout=_EXPORT_S)
        export: Callable[..., Any] = exporter.export

        def counted(*arguments: Any, **options: Any) -> Any:
            result = MetricExportResult.FAILURE
            try:
                result = export(*arguments, **options)
            finally:
                self._failures = 0 if result is MetricExportResult.SUCCESS else self._failures + 1
            return result

        exporter.export = counted
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=math.inf)  # `send` says when
        self._provider = MeterProvider([reader], Resource.create(self.attributes()), shutdown_on_exit=False)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the resource, under Megatron-LM's names where it has them."""
        sections = self._description.sections
        values = {name: value for section in sections.values() for name, value in section.items()}
        service = values["otel_service_name"] or os.environ.get("OTEL_SERVICE_NAME", "megatron-training")
        precision = next((name for name in ("fp16", "bf16") if values.get(name)), "fp32")
        split = math.prod(values[f"{axis}_parallel_size"] for axis in ("tensor_model", "pipeline_model", "context"))
        found = {_ATTRIBUTES[name]: value for name, value in values.items() if name in _ATTRIBUTES}
        return {
            "service.name": service,
            "dl.data_parallel.size": self._description.world_size // split,
            "megatron.precision": precision,
            "megalite.configuration": self._description.configuration,
            **{name: value for name, value in found.items() if value is not None},
        }

    def send(self, records: Sequence[Record]) -> None:
        """Record the steps, and export. Raises ConnectionError if the collector has not taken the last ones."""
        for record in records:
            self._record(record)
        self._provider.force_flush(_EXPORT_S * 1000)
        if self._failures >= _FAILURES:
            raise ConnectionError(f"the collector has not taken the last {_FAILURES} exports")

    def _record(self, record: Record) -> None:
        if "iteration_time_s" in record:
            self._instrument("create_histogram", STEP, "ms").record(float(record["iteration_time_s"] or 0) * 1000)
            self._instrument("create_counter", SKIPPED).add(int(bool(record["skipped"])))
        for key, value in record.items():
            if key not in ("iteration_time_s", "skipped") and value is not None:
                name, factor = GAUGES.get(key, (_NOT_IN_NAMES.sub("_", f"megalite.{key}")[:255], 1.0))
                self._instrument("create_gauge", name).set(float(value) * factor)

    def _instrument(self, create: str, name: str, unit: str = "") -> Any:
        if name not in self._instruments:
            meter = self._provider.get_meter("megalite")
            self._instruments[name] = getattr(meter, create)(name, unit)
        return self._instruments[name]

    def close(self, *, ended: bool) -> None:
        """Export what is left."""
        self._provider.shutdown(_EXPORT_S * 1000)

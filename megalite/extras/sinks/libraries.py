"""Libraries of sinks: a run that lacks one of them ends before its ranks meet."""

from __future__ import annotations

from importlib.util import find_spec

from megalite.config.reporting import ReportingConfig, SinkName
from megalite.errors import ConfigurationError

_NEEDED: dict[SinkName, tuple[str, str]] = {
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "opentelemetry": (
        "opentelemetry.exporter.otlp.proto.http.metric_exporter",
        "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
    ),
}
"""Module of each sink, and the packages that have it."""


def require_libraries(reporting: ReportingConfig) -> None:
    """Raise ConfigurationError if a sink lacks its library."""
    missing = [
        f"--report-to {sink} needs a library that is not installed: pip install {packages}"
        for sink, (module, packages) in _NEEDED.items()
        if reporting.reports(sink) and not _is_there(module)
    ]
    if missing:
        raise ConfigurationError("\n".join(missing))


def _is_there(module: str) -> bool:
    try:
        spec = find_spec(module)
        return spec is not None and spec.origin is not None  # a folder named wandb, as it leaves some, has no origin
    except ModuleNotFoundError:  # not even its parents
        return False

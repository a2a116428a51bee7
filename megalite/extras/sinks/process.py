"""Process of the services of a run, beside that of rank 0.

Libraries of services start threads and processes of their own, and wait for the network when their process ends. Here
they share neither the interpreter nor the end with the training, and can be killed.

It reads lines of JSON: the description of the run, then records. It writes messages to the user, a line each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib import import_module

from megalite.extras.sinks.background import Background, Service
from megalite.extras.sinks.description import Description
from megalite.extras.sinks.link import ENDED

_SERVICES = {
    "wandb": "wandb_run:WandBRun",
    "mlflow": "mlflow_run:MLflowRun",
    "opentelemetry": "otlp:OpenTelemetryMeter",
    "prometheus": "prometheus_textfile:PrometheusTextfile",
}


def service(name: str, description: Description) -> Service:
    """Return a service. Its library is imported when it is opened."""
    module, _, kind = _SERVICES[name].partition(":")
    found: Service = getattr(import_module(f"megalite.extras.sinks.{module}"), kind)(description)
    return found


def main() -> None:
    """Pass on records until there are no more of them, and end for certain."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # a launcher signals all processes of a job
        signal.signal(number, signal.SIG_IGN)
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what libraries print

    def tell(message: str) -> None:
        messages.write(f"{message}\n")

    description = Description(**json.loads(sys.stdin.readline()))
    services = [service(name, description) for name in description.wanted]
    background = Background(services, tell, close_s=float(sys.argv[1]))
    ended = False
    for line in sys.stdin:
        try:
            record = json.loads(line)
        except ValueError:  # rank 0 was killed within a line
            break
        ended = record == ENDED
        if not ended:
            background.write(record)
    background.close(ended=ended)
    messages.close()
    os._exit(0)  # not waiting for threads, or for what libraries do at the end

"""MLflow: a run in an experiment, with Megatron-LM's names."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

from megalite.extras.sinks.background import Record
from megalite.extras.sinks.curves import Curves
from megalite.extras.sinks.description import Description
from megalite.extras.sinks.identity import keep_name, kept_name

_SENT = {True: "megalite.last_step", False: "megalite.last_evaluation"}
"""Tags with the last step and the last evaluation that the run has."""
_ATTEMPT = "megalite.attempt"
"""Tag with the process that has begun or continued the run last."""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_./ -]")
_LONGEST = 500  # characters of a parameter: older servers take no more
_PARAMETERS, _METRICS = 100, 1000  # most of one request


class MLflowRun:
    """Service that logs to MLflow, at MLFLOW_TRACKING_URI, in the experiment MLFLOW_EXPERIMENT_NAME ("megalite").

    A resumed run continues as the same one, without records of steps that it has: these keep their first values.
    """

    name = "mlflow"
    interval_s = 10.0

    def __init__(self, description: Description) -> None:
        self._description = description
        self._curves = Curves(description.consumed_samples)
        self._sent = {True: 0, False: 0}
        self._client: Any = None
        self._run = ""
        self._attempt = secrets.token_hex(8)

    def open(self) -> None:
        """Begin the run with the configuration as parameters, or continue it."""
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        description, place = self._description, self._description.place
        self._client = client = MlflowClient()
        name = kept_name(place, self.name) if description.continues else None
        if name is not None:
            try:
                tags = client.get_run(name).data.tags
                client.set_tag(name, _ATTEMPT, self._attempt)
                client.update_run(name, status="RUNNING")
                self._run = name
                self._sent = {kind: int(tags.get(tag, 0)) for kind, tag in _SENT.items()}
                return
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # it was deleted, or is at another server
                    raise
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "megalite")
        found = client.get_experiment_by_name(experiment)
        number = client.create_experiment(experiment) if found is None else found.experiment_id
        tags = {_ATTEMPT: self._attempt}
        self._run = client.create_run(number, run_name=description.name, tags=tags).info.run_id
        keep_name(place, self.name, self._run)
        parameters = [
            Param(f"{section}.{field}", str(value)[:_LONGEST])
            for section, values in description.sections.items()
            for field, value in values.items()
        ]
        for first in range(0, len(parameters), _PARAMETERS):
            client.log_batch(self._run, params=parameters[first : first + _PARAMETERS])

    def send(self, records: Sequence[Record]) -> None:
        """Log the records that the run does not have yet."""
        from mlflow.entities import RunTag

        metrics = [metric for record in records for metric in self._metrics(record)]
        for first in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._run, metrics=metrics[first : first + _METRICS])
        tags = [RunTag(tag, str(self._sent[kind])) for kind, tag in _SENT.items()]
        self._client.log_batch(self._run, tags=tags)

    def _metrics(self, record: Record) -> Iterator[Any]:
        from mlflow.entities import Metric

        points, step, is_step = self._curves.of(record), cast(int, record["iteration"]), "grad_norm" in record
        if step > self._sent[is_step]:
            self._sent[is_step] = step
            now = int(time.time() * 1000)
            yield from (Metric(_NOT_IN_NAMES.sub("_", name), value, now, step) for name, value in points.items())

    def close(self, *, ended: bool) -> None:
        """Mark the run as finished, or as failed if it was killed and no other process has continued it since."""
        if not ended and self._client.get_run(self._run).data.tags.get(_ATTEMPT) != self._attempt:
            return
        self._client.set_terminated(self._run, status="FINISHED" if ended else "FAILED")

"""Generation: all ranks of a run, started together by their nodes' agents. Here: what a rank knows of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from megalite.process.launchers import GENERATION

STATE = "MEGALITE_GENERATION_STATE"


@dataclass(frozen=True)
class Generation:
    """Generation of this rank, as its agent has told it."""

    number: int
    """Number of the generation, from 1."""
    began: float
    """Start of the run, as `time.monotonic` in seconds."""
    stop: tuple[int, int] | None
    """`identity` of a STOP from before the run, which is not meant for it; None if there was none."""
    descriptor: int
    """Pipe to the agent."""
    process: int
    """Process of the rank. Those that it forks or starts have its environment, and say nothing in its name."""

    def variables(self) -> dict[str, str]:
        """Return the variables of the environment from which the rank reads this."""
        state = {"began": self.began, "stop": self.stop, "descriptor": self.descriptor, "process": self.process}
        return {GENERATION: str(self.number), STATE: json.dumps(state)}

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Generation:
        """Return what `variables` gave."""
        state = json.loads(environment[STATE])
        stop = None if state["stop"] is None else (state["stop"][0], state["stop"][1])
        return cls(int(environment[GENERATION]), state["began"], stop, state["descriptor"], state["process"])

    def tell_begun(self, iteration: int) -> None:
        """Tell the agent the step after which this rank goes on."""
        self._tell(f"begun {iteration}")

    def tell_end(self, code: int) -> None:
        """Tell the agent that this rank ends on purpose, with an exit code: it has not failed."""
        self._tell(f"end {code}")

    def tell_replicas(self, stride: int, replicas: int) -> None:
        """Tell the agent that rank r is of replica r // stride % replicas, and can finish a step without others."""
        self._tell(f"replicas {stride} {replicas}")

    def _tell(self, words: str) -> None:
        if os.getpid() != self.process:
            return
        with suppress(OSError):  # the agent has ended, and this process is about to be killed
            os.write(self.descriptor, f"{words}\n".encode())


@cache
def generation() -> Generation:
    """Return the generation of this process."""
    return Generation.of(os.environ)


def tell_end(code: int) -> None:
    """Tell the agent that this rank ends on purpose."""
    generation().tell_end(code)

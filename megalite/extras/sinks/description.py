"""Description of a run, which its services get. It has nothing of the environment, and no credentials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from megalite.config.run import TaskConfig
from megalite.config.yaml_file import dump
from megalite.storage import AnyPath, open_directory, without_credentials


@dataclass(frozen=True)
class Description:
    """Facts that services are told of a run.

    Attributes:
        wanted: the services.
        directory: the run directory; None: there is none.
        consumed_samples: samples until the first step.
        configuration: the configuration as YAML.
        world_size: number of ranks.
    """

    wanted: tuple[str, ...]
    directory: str | None
    consumed_samples: int
    configuration: str
    world_size: int

    @property
    def continues(self) -> bool:
        """True if the run continues one: the names that services have for it are those of its directory."""
        return self.consumed_samples > 0

    @property
    def place(self) -> AnyPath | None:
        """The run directory. Raises as `open_directory`."""
        return None if self.directory is None else open_directory(self.directory)

    @property
    def name(self) -> str:
        """Name of the run: that of its directory."""
        return "run" if self.directory is None else self.directory.rstrip("/").rpartition("/")[2] or "run"

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        """The configuration by section and field."""
        found: dict[str, dict[str, Any]] = yaml.safe_load(self.configuration)
        return found

    def option(self, name: str) -> Any:
        """Return an option of sinks."""
        return self.sections["reporting"][name]


def configuration_text(config: TaskConfig) -> str:
    """Return the configuration as YAML, as it may leave the machine."""
    return without_credentials(dump(config))

"""Libraries that only some inputs and tokenizers need."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from typing import Any

from megalite.errors import ConfigurationError


def optional_import(module: str, package: str, why: str) -> Any:
    """The module, imported.

    Args:
        module: its name.
        package: what installs it, and the oldest version that will do, as `jinja2>=3.1.6`.
        why: what needs it, the beginning of the message.

    Raises:
        ConfigurationError: it is not installed, or too old; the message says how to install it.
    """
    name, _, oldest = package.partition(">=")
    install = f"pip install '{package}'" if oldest else f"pip install {package}"
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{why}, which needs {package}: {install}") from error
    if oldest and _numbers(version := importlib.metadata.version(name)) < _numbers(oldest):
        raise ConfigurationError(f"{why}, which needs {package}, and {version} is installed: {install}")
    return found


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]

"""Import of libraries that only some inputs and tokenizers need."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from typing import Any

from megalite.errors import ConfigurationError


def optional_import(module: str, package: str, why: str) -> Any:
    """Import and return a module.

    Args:
        module: name of the module.
        package: package to install, optionally with its oldest usable version, such as `jinja2>=3.1.6`.
        why: the feature that needs it; the error message begins with this text.

    Raises:
        ConfigurationError: the package is not installed, or too old; the message says how to install it.
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

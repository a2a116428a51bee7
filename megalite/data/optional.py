"""Libraries that only some inputs and tokenizers need."""

from __future__ import annotations

import importlib
from typing import Any

from megalite.errors import ConfigurationError


def optional_import(module: str, package: str, why: str) -> Any:
    """The module, imported.

    Args:
        module: its name.
        package: what installs it.
        why: what needs it, the beginning of the message.

    Raises:
        ConfigurationError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{why}, which needs {package}: pip install {package}") from error

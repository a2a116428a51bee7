"""Named sites of a program, and the files that its runs leave: megalite's, or those of a --sites-file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.errors import ConfigurationError
from megalite.small_files import parse_toml, read_small_file

SITES = Path(__file__).with_name("sites.toml")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True)
class Results:
    """Files of a run directory.

    Attributes:
        records: name of the file with a JSON object a line.
        number, loss, samples: keys of its lines: the step's number, the loss (only lines of steps have it), and the
            samples consumed so far ("" if the program does not tell them).
        ignored: parts of keys whose values are not compared.
        weights: pattern of the files with the weights; those of the last folder are the final ones.
        checkpoints: pattern of the files of checkpoints.
    """

    records: str
    number: str
    loss: str
    samples: str
    ignored: tuple[str, ...]
    weights: str
    checkpoints: str


@dataclass(frozen=True)
class Sites:
    """Sites of a program.

    Attributes:
        sites: function and `when` of each site by its name.
        step: function that ends with a finished step, and the attribute of its first argument with the step's number.
        recovery: names of the sites that a starting process passes.
        results: files of a run directory.
    """

    sites: Mapping[str, Mapping[str, str]]
    step: Mapping[str, str]
    recovery: tuple[str, ...]
    results: Results


def read_sites(path: Path = SITES) -> Sites:
    """Read the sites of a program. Raises ConfigurationError that names the file and what is wrong in it."""
    try:
        tables: dict[str, Any] = parse_toml(read_small_file(path).decode())
        sites, step, results = (tables.pop(name) for name in ("sites", "step", "results"))
        recovery = tuple(tables.pop("recovery", ()))
        for each in (*sites.values(), step):
            if not _FUNCTION.fullmatch(each["function"]) or each.get("when", "before") not in ("before", "after"):
                raise ValueError(f"{each}: must have function = 'module:name' and when = 'before' or 'after'")
        if tables or set(recovery) - set(sites):
            raise ValueError(f"not understood: {', '.join([*tables, *(set(recovery) - set(sites))])}")
        texts = {name: value for name, value in results.items() if name != "ignored"}
        if not all(isinstance(value, str) for value in texts.values()):
            raise ValueError("[results] has texts, but for the list `ignored`")
        return Sites(sites, step, recovery, Results(**texts, ignored=tuple(results.get("ignored", ()))))
    except KeyError as error:
        raise ConfigurationError(f"--sites-file {path}: {error} is missing") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"--sites-file {path}: {error}") from error

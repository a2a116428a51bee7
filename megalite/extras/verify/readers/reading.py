"""Reading of a trace by the reader that knows its files."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from megalite.errors import ConfigurationError
from megalite.extras.verify.readers import megatron, msprobe, own, sglang, torchtitan
from megalite.extras.verify.trace import Trace

_READERS: tuple[ModuleType, ...] = (own, megatron, torchtitan, sglang, msprobe)
_READ = (
    "what is read: a folder of megalite_trace.py; the folder of Megatron-LM's --save with activations, dgrads, wgrads "
    "or params; torchtitan's rank_N_activations.log; a dump of SGLang's dumper (step=0___rank=0___...pt); and "
    "msprobe's folder with step0/rank0/dump.json"
)


def read_trace(path: Path, step: int | None) -> Trace:
    """Read a trace of any program that is known.

    Args:
        step: the step to read; None for the first one.

    Raises:
        ConfigurationError: there is no such folder, no reader knows its files, or the step is not there.
        CheckpointError, DataError: the files cannot be read, or have nothing to compare.
    """
    if not path.exists():
        raise ConfigurationError(f"there is no trace {path}")
    for reader in _READERS:
        if reader.owns(path):
            found: Trace = reader.read(path, step)
            return found
    raise ConfigurationError(f"{path} has no trace whose files are known ({_READ})")

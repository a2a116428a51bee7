"""Place of this process in TF_CONFIG, which launchers of TensorFlow set: chief, workers and parameter servers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from megalite.errors import ConfigurationError
from megalite.process.launchers import LauncherInfo, Number

_ROLES = ("chief", "master", "worker", "ps")
"""Types of tasks that are ranks, in the order of their ranks. `master` is the chief of earlier releases."""
_LARGEST = 2**17
_KINDS = {dict: "an object", list: "a list", str: "a text", int: "a whole number"}
_ADDRESS = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]):([1-9][0-9]{0,4})", re.ASCII)


def read_tf_config(environment: Mapping[str, str]) -> LauncherInfo:
    """Return what TF_CONFIG tells: nothing if it is not set, or has no cluster.

    The chief is rank 0, then come the workers, and last the parameter servers. Tasks with the same host share a node.

    Raises:
        ConfigurationError: it is no JSON of the form that TensorFlow reads, or this task is no rank.
    """
    text = environment.get("TF_CONFIG", "").strip() or "{}"
    try:
        given = json.loads(text) if len(text) <= _LARGEST else _refuse(f"has more than {_LARGEST:,} characters")
    except (ValueError, RecursionError):
        _refuse("is not JSON")
    cluster = _member(given, "cluster", dict) or {}
    addresses = [address for role in _ROLES for address in _addresses(cluster, role)]
    if not addresses:
        return LauncherInfo()
    if len(set(addresses)) < len(addresses):
        _refuse("gives two tasks the same address")
    task = _member(given, "task", dict) or {}
    if isinstance(digits := task.get("index"), str) and re.fullmatch("[0-9]{1,9}", digits):
        task = {**task, "index": int(digits)}  # as TensorFlow reads it
    role, index = _member(task, "type", str), _member(task, "index", int)
    if role == "evaluator":
        _refuse(
            "makes this process an evaluator, which is no rank here: start env -u TF_CONFIG megalite-evaluate --load "
            "DIR on the run's checkpoints, or give the run --eval-interval and --eval-iters, which all ranks share"
        )
    if role not in _ROLES:
        _refuse(f"has the task type {role!r:.60}: the ranks are of the types {', '.join(_ROLES)}")
    here = _addresses(cluster, role)
    if index is None or not 0 <= index < len(here):
        _refuse(f"has {role} {index!r:.40} as its task, but its cluster has {len(here)} of them")
    rank = addresses.index(here[index])
    hosts = [address.rpartition(":")[0] for address in addresses]
    return LauncherInfo(
        "TensorFlow's launcher",
        Number(rank, "TF_CONFIG's rank"),
        Number(len(hosts), "TF_CONFIG's number of ranks"),
        Number(hosts[:rank].count(hosts[rank]), "TF_CONFIG's rank on the host"),
        Number(hosts.count(hosts[rank]), "TF_CONFIG's ranks on the host"),
        hosts[0].strip("[]"),
        int(addresses[0].rpartition(":")[2]),
        agents=True,
        servers=len(_addresses(cluster, "ps")) or None,
    )


def _addresses(cluster: Mapping[str, Any], role: str) -> list[str]:
    """Return the addresses of the tasks of a type, each HOST:PORT."""
    found = _member(cluster, role, list) or []
    for address in found:
        parts = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if parts is None or int(parts[2]) >= 2**16:
            _refuse(f"has the address {address!r:.80} of a {role}: expected HOST:PORT")
    return found


def _member(given: Any, name: str, kind: type) -> Any:
    """Return a member of an object; None if it has none."""
    value = given.get(name) if isinstance(given, dict) else _refuse(f"has no object around {name!r}")
    if value is not None and type(value) is not kind:
        _refuse(f"has {value!r:.60} as its {name!r}: expected {_KINDS[kind]}")
    return value


def _refuse(why: str) -> NoReturn:
    raise ConfigurationError(f"TF_CONFIG {why} (it says where the processes are; without it, unset it)")

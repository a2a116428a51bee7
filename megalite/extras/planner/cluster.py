"""Clusters: GPUs with their constants and the links between them, from clusters.toml, a file or measurements; and the
programs that train on them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from megalite.errors import ConfigurationError
from megalite.small_files import parse_toml, read_small_file, reason, shown
from megalite.tasks.flops import peak_flops

_FILE = Path(__file__).with_name("clusters.toml")
_WITHIN, _POINT_TO_POINT = "within a node", "point to point"
_FACTORS = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0}


@dataclass(frozen=True)
class Link:
    """Link of each rank to the others of a node, or of a node's ranks to other nodes.

    Attributes:
        alpha: seconds per hop.
        beta: seconds per byte.
        multicast: true if switches add up and copy what ranks send.
    """

    alpha: float
    beta: float
    multicast: bool = False


@dataclass(frozen=True)
class Host:
    """A rank's share of its host.

    Attributes:
        memory: bytes.
        bandwidth: bytes per second of the memory.
        beta: seconds per byte of the link between the GPU and the host, in one direction.
    """

    memory: float
    bandwidth: float
    beta: float


@dataclass(frozen=True)
class Gpu:
    """GPU with the constants of its kernels; clusters.toml describes the fields."""

    name: str
    memory: float
    reserved: float
    bandwidth: float
    peak: Mapping[str, float] = field(hash=False)
    attention: Mapping[str, float] = field(hash=False)
    efficiency: float
    half: float
    share: float
    kernel: float
    launch: float
    generation: str | None = None

    def peak_of(self, dtype: str) -> float:
        """Return the peak in FLOP/s of a dtype; that of float32 for one that is missing."""
        return self.peak.get(dtype) or self.peak["float32"]

    @property
    def is_cpu(self) -> bool:
        """True for a core of a CPU, which runs no kernels of GPUs."""
        return self.name == "cpu"

    @property
    def half_peak(self) -> float:
        """Peak in FLOP/s of the 16-bit dtypes."""
        return self.peak.get("bfloat16") or self.peak_of("float16")


@dataclass(frozen=True)
class Stack:
    """Program that runs the step, as far as it differs from megalite; clusters.toml describes the fields.

    Attributes:
        low_precision: dtype of the products of layers, if it is another than that of the activations.
        measured: whether published runs gave the factor, which is 1 otherwise.
    """

    name: str = "megalite"
    factor: float = 1.0
    attention: str = "flash-2"
    hidden_tensor: float = 0.0
    hidden_expert: float = 0.0
    node_first: bool = False
    graphs: bool = False
    scattered: bool = False
    low_precision: str | None = None

    @property
    def measured(self) -> bool:
        return self.name != Stack.name


@dataclass(frozen=True)
class Cluster:
    """Nodes with the same number of GPUs each.

    Attributes:
        node_ranks: ranks of a node.
        node, network: links within a node and between nodes.
        nodes: number of nodes; None: as many as are asked for.
        hosts: machines of a node: more than one where NVLink connects a rack.
        host: each rank's share of its machine; None: it is not known.
    """

    name: str
    gpu: Gpu
    node_ranks: int
    node: Link
    network: Link
    nodes: int | None = None
    hosts: int = 1
    host: Host | None = None

    @property
    def known_host(self) -> Host:
        """The rank's share of its machine. Raises ConfigurationError if it is not known."""
        if self.host is None:
            raise ConfigurationError(
                f"--optimizer-cpu-offload: nothing is known of the hosts of --cluster {self.name}: give a file with "
                "host = { memory, bandwidth, beta }, as clusters.toml describes it"
            )
        return self.host

    def per_host(self, gpus: int) -> int:
        """Return the ranks that a run has on each of its hosts: as many as divide its GPUs evenly."""
        most = min(self.node_ranks // self.hosts, gpus)
        return next(count for count in range(most, 0, -1) if gpus % count == 0)


_NUMBERS = tuple(each.name for each in fields(Gpu) if each.type == "float")
_MAY_BE_ZERO = frozenset({"alpha", "half", "reserved", "kernel", "launch"})


def find_cluster(name: str, flag: str = "--cluster") -> Cluster:
    """Return a cluster by the name of a cluster or of a GPU in clusters.toml, or by the path of a file.

    Raises:
        ConfigurationError: there is no such name or file, or the file has a mistake; names the file and the key.
    """
    known = _known()
    if name in known["cluster"]:
        return _cluster(known["cluster"][name], name, f"{_FILE.name} cluster.{name}")
    if name in known["gpu"]:
        return _cluster({"gpu": name}, name, f"{_FILE.name} gpu.{name}")
    if not Path(name).is_file():
        names = ", ".join([*known["cluster"], *known["gpu"]])
        raise ConfigurationError(f"{flag} {shown(name)}: neither a file nor one of {names}")
    return _cluster(_table(Path(name)), Path(name).stem, name)


def known_clusters() -> tuple[str, ...]:
    """Return the names of the clusters and GPUs in clusters.toml."""
    known = _known()
    return (*known["cluster"], *known["gpu"])


def find_stack(name: str) -> Stack:
    """Return a program by its name in clusters.toml. Raises ConfigurationError if there is none."""
    known = _known()["stack"]
    if name not in known:
        raise ConfigurationError(f"{shown(name)} is no known program: give one of {', '.join(known)}")
    return Stack(name, **known[name])


def _table(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(read_small_file(path).decode())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: cannot be read as TOML: {reason(error)}") from None


@cache
def _known() -> dict[str, Any]:
    """Return the tables of clusters.toml, with the peaks of 16-bit dtypes that runs report their utilization by."""
    known = tomllib.loads(_FILE.read_text())
    for name, gpu in known["gpu"].items():
        if (peak := peak_flops(name)) is not None:
            gpu["peak"] |= {"bfloat16": peak, "float16": peak}
    return known


def _cluster(table: Mapping[str, Any], name: str, where: str) -> Cluster:
    """Read a cluster from the table of a file, of which `where` tells in errors.

    Raises:
        ConfigurationError: a key is unknown or missing, or its value is not of its kind.
    """
    known = _known()["gpu"]
    _only(table, ("gpu", "nodes", "node", "network", "host"), where)
    described = table.get("gpu")
    if isinstance(described, str):
        if described not in known:
            raise ConfigurationError(f"{where}: gpu is {shown(described)}: give one of {', '.join(known)}, or a table")
        described, gpu_name = known[described], described
    elif isinstance(described, Mapping):
        gpu_name = str(described.get("name", "gpu"))
    else:
        raise ConfigurationError(f"{where}: gpu is missing: give one of {', '.join(known)}, or a table")
    within = f"{where}: gpu"
    _only(described, ("name", "generation", "peak", "attention", "node", "network", "host", *_NUMBERS), within)
    numbers = {each: _number(described, each, within) for each in _NUMBERS}
    tables: dict[str, dict[str, float]] = {}
    for key, needed, what in (("peak", "float32", "FLOP/s by dtype"), ("attention", "flash-2", "shares by kernel")):
        own = described.get(key)
        if not isinstance(own, Mapping) or needed not in own:
            raise ConfigurationError(f"{within}.{key} is missing: give {what}, {needed} among them")
        tables[key] = {each: _number(own, each, f"{within}.{key}") for each in own}
    generation = described.get("generation")
    if not isinstance(generation, str | None):
        raise ConfigurationError(f"{within}.generation is {shown(generation)}: give a name, such as 'Hopper'")
    gpu = Gpu(gpu_name, peak=tables["peak"], attention=tables["attention"], generation=generation, **numbers)
    links = {}
    for link in ("node", "network"):
        own = table.get(link, described.get(link))
        links[link] = own
        if not isinstance(own, Mapping):
            raise ConfigurationError(f"{where}: {link} is missing: give alpha and beta of this link")
        _only(own, ("alpha", "beta", "multicast", *(["ranks", "hosts"] if link == "node" else [])), f"{where}: {link}")
    nodes = _whole(table, "nodes", where) if "nodes" in table else None
    ranks = _whole(links["node"], "ranks", f"{where}: node")
    hosts = _whole(links["node"], "hosts", f"{where}: node") if "hosts" in links["node"] else 1
    if ranks % hosts:
        raise ConfigurationError(f"{where}: node.hosts is {hosts}: give a divisor of node.ranks, {ranks}")
    node, network = (_link(links[each], f"{where}: {each}") for each in ("node", "network"))
    return Cluster(
        name, gpu, ranks, node, network, nodes, hosts, _host(table.get("host", described.get("host")), where)
    )


def _host(table: object, where: str) -> Host | None:
    if table is None:
        return None
    names = tuple(each.name for each in fields(Host))
    if not isinstance(table, Mapping):
        raise ConfigurationError(f"{where}: host is {shown(table)}: give a table with {', '.join(names)}")
    _only(table, names, f"{where}: host")
    return Host(**{each: _number(table, each, f"{where}: host") for each in names})


def _link(table: Mapping[str, Any], where: str) -> Link:
    alpha, beta = (_number(table, each, where) for each in ("alpha", "beta"))
    multicast = table.get("multicast", False)
    if not isinstance(multicast, bool):
        raise ConfigurationError(f"{where}.multicast is {shown(multicast)}: give true or false")
    return Link(alpha, beta, multicast)


def _number(table: Mapping[str, Any], key: str, where: str) -> float:
    value = table.get(key)
    if value is None:
        raise ConfigurationError(f"{where}.{key} is missing: give a number (clusters.toml describes it)")
    least = "0 or more" if key in _MAY_BE_ZERO else "above 0"
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigurationError(f"{where}.{key} is {shown(value)}: give a number {least}")
    if value == 0 and key not in _MAY_BE_ZERO:
        raise ConfigurationError(f"{where}.{key} is 0: give a number {least}")
    return float(value)


def _whole(table: Mapping[str, Any], key: str, where: str) -> int:
    number = _number(table, key, where)
    if number % 1:
        raise ConfigurationError(f"{where}.{key} is {shown(table[key])}: give a whole number, 1 or more")
    return int(number)


def _only(table: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    unknown = [key for key in table if key not in keys]
    if unknown:
        raise ConfigurationError(f"{where}: {shown(unknown[0])} is unknown: keys are {', '.join(keys)}")


# ------------------------------------------------------------------------------------------------- measurements


def with_doctor(cluster: Cluster, found: Mapping[str, Any]) -> Cluster:
    """Return a cluster whose links are those that `megalite doctor --json` measured.

    A link's beta is that of collectives if any was measured, otherwise that of messages between two ranks; its alpha is
    that of messages between two ranks, or that of a collective by its steps. Lines whose seconds do not grow with the
    bytes say nothing. The nodes are doctor's, which are machines.

    Raises:
        ConfigurationError: it is not what doctor writes.
    """
    lines: dict[bool, dict[str, tuple[int, Link]]] = {True: {}, False: {}}
    try:
        for figure in found["timings"]:
            name = figure["operation"]
            if figure["line"] is not None and figure["line"]["beta"] != 0 and name in (*_FACTORS, _POINT_TO_POINT):
                where = f"{name} {figure['scope']}"
                ranks = _whole(figure, "ranks", where)
                if ranks < 2:
                    raise ConfigurationError(f"{where}.ranks is {ranks}: a message has two ranks or more")
                lines[figure["scope"] == _WITHIN][name] = ranks, _link(figure["line"], where)
        node_ranks = [len(node["ranks"]) for node in found["nodes"].values()]
    except (ConfigurationError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"not a file of doctor --json: {reason(error)}") from None
    node = _measured(cluster.node, lines[True])
    network = _measured(cluster.network, lines[False])
    if max(node_ranks, default=0):
        cluster = replace(cluster, node_ranks=max(node_ranks), hosts=1)
    return replace(cluster, node=node, network=network)


def _measured(link: Link, lines: Mapping[str, tuple[int, Link]]) -> Link:
    """Return the mean of the collectives' lines, with the alpha of messages to one rank, or `link` if none is there."""
    alphas, betas = [], []
    for name, factor in _FACTORS.items():
        if name in lines:
            ranks, line = lines[name]
            alphas.append(line.alpha / (factor * (ranks - 1)))
            betas.append(line.beta / (factor * (ranks - 1) / ranks))
    if _POINT_TO_POINT in lines:
        _, line = lines[_POINT_TO_POINT]
        alphas = [line.alpha]
        betas = betas or [line.beta]
    if not betas:
        return link
    return Link(sum(alphas) / len(alphas), sum(betas) / len(betas), multicast=False)

"""Two sites with a slow link: time to a loss, the bytes on the link, and a site that leaves and comes back.

    python -m benchmarks.sites [--rate 50mbit] [--latency 0.01] [--ranks 2] [--steps 120] [--loss 6.2]

Each site is a network namespace with ranks in it. A pair of veth devices joins them, and `tc tbf` limits what each
sends. Latency comes from netem if the kernel has it, else from a relay in a third namespace. Bytes are those that the
kernel counts on the devices. Needs Linux, root (or CAP_NET_ADMIN and CAP_SYS_ADMIN), and `ip`, `tc` and `nsenter`
(iproute2, util-linux). The data are those of `make train` if they are in run/, else mock data.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.results import write_results
from benchmarks.start import ROOT, environment
from megalite.extras.comparison.commands.compare_synchronization import CORPUS, CORPUS_FLAGS, SMALL_MODEL

MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 4096"
SITES = 2
SMOOTHED = 10
"""Steps whose mean loss is compared with the one to reach."""
PLAIN = "plain data parallelism"
METHODS = {
    PLAIN: "",
    "hierarchical": "--sites 2",
    "hierarchical, int8 between": "--sites 2 --gradient-compression none int8",
    "diloco, period 10": "--sites 2 --local-update diloco --local-update-period 10",
    "diloco, period 50": "--sites 2 --local-update diloco --local-update-period 50",
}
LONGER = {"diloco, period 10": 4, "diloco, period 50": 4}
"""Times that a method gets the steps of the others: it takes more of them, which send less."""
LEAVES = METHODS["diloco, period 10"].split()
COUNTED = {
    PLAIN: "",
    "int8": "--gradient-compression int8",
    "diloco": "--local-update diloco --local-update-period 10",
}
"""Methods whose bytes are compared, with one rank per site: each of its messages crosses the link."""
PROGRAMS = "ip", "tc", "nsenter"
MAKE_SPACE = "ip", "netns", "add"


def run(*command: str) -> str:
    """Run a command of the system. Raises CalledProcessError if it fails."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Network:
    """Two namespaces and the link between them."""

    def __init__(self, rate: str, latency: float) -> None:
        """Make them. Raises CalledProcessError without the rights to."""
        number = os.getpid()
        self.spaces = [f"megalite-site-{number}-{site}" for site in range(SITES)]
        self._between = f"megalite-relay-{number}"
        self._relay: subprocess.Popen[bytes] | None = None
        self.latency = ""
        try:
            self._make(rate, latency)
        except BaseException:
            self.close()
            raise

    def _make(self, rate: str, latency: float) -> None:
        for space in self.spaces:
            run(*MAKE_SPACE, space)
            run("ip", "-n", space, "link", "set", "lo", "up")
        relayed = latency > 0 and not self._has_netem()
        pair = ["site0", "netns", self.spaces[0], "type", "veth", "peer", "name", "site1", "netns", self.spaces[1]]
        if relayed:
            run(*MAKE_SPACE, self._between)
            for site, space in enumerate(self.spaces):
                ends = [f"site{site}", "netns", space, "type", "veth", "peer", "name", f"relay{site}"]
                run("ip", "link", "add", *ends, "netns", self._between)
                run("ip", "-n", self._between, "link", "set", f"relay{site}", "up")
        else:
            run("ip", "link", "add", *pair)
        for site, space in enumerate(self.spaces):
            device = f"site{site}"
            run("ip", "-n", space, "address", "add", f"{self.address(site)}/24", "dev", device)
            # One frame at a time, as on a cable: without it the kernel hands on, and counts, 64 KiB with one header.
            run("ip", "-n", space, "link", "set", device, "gso_max_segs", "1", "up")
            limit = ["tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
            run("tc", "-n", space, "qdisc", "add", "dev", device, "root", "handle", "1:", *limit)
            if latency and not relayed:
                delay = ["netem", "delay", f"{latency * 1e3}ms", "limit", "10000"]
                run("tc", "-n", space, "qdisc", "add", "dev", device, "parent", "1:1", *delay)
        if relayed:
            relay = [sys.executable, "-m", "benchmarks.relay", "relay0", "relay1", str(latency)]
            inside = ["nsenter", f"--net=/run/netns/{self._between}", *relay]
            self._relay = subprocess.Popen(inside, cwd=ROOT, env=environment())
        self.latency = ("a relay" if relayed else "netem") if latency else "none"

    def _has_netem(self) -> bool:
        command = ["tc", "-n", self.spaces[0], "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
        found = subprocess.run(command, capture_output=True, check=False).returncode == 0
        if found:
            run("tc", "-n", self.spaces[0], "qdisc", "delete", "dev", "lo", "root")
        return found

    def address(self, site: int) -> str:
        """Return the address of a site."""
        return f"10.78.0.{site + 1}"

    def sent(self, site: int) -> int:
        """Return the bytes that a site has sent, as the kernel counts them."""
        counter = f"/sys/class/net/site{site}/statistics/tx_bytes"
        return int(run("ip", "netns", "exec", self.spaces[site], "cat", counter))

    def close(self) -> None:
        """Remove the namespaces, and with them the devices."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
        for space in [*self.spaces, self._between]:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)


class Training:
    """Ranks of a run, in the namespaces of their sites."""

    def __init__(self, network: Network, sites: Sequence[int], ranks: int, words: Sequence[str], folder: Path) -> None:
        """Start `ranks` ranks in each of these sites. What they print is in `folder`, and their metrics."""
        self.network, self.folder = network, folder
        self.metrics = folder / "metrics.jsonl"
        self.processes: dict[int, list[subprocess.Popen[bytes]]] = {}
        world = ranks * len(sites)
        shared = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": "29500"}
        shared["MASTER_ADDR"] = network.address(sites[0])
        with ExitStack() as files:
            for rank in range(world):
                site, local = sites[rank // ranks], rank % ranks
                output = files.enter_context((folder / f"rank_{rank}.log").open("wb"))
                own = {"RANK": str(rank), "LOCAL_RANK": str(local), "GLOO_SOCKET_IFNAME": f"site{site}"}
                own["MEGALITE_EXIT_FILE"] = str(folder / f"exit_{rank}")
                command = ["nsenter", f"--net=/run/netns/{network.spaces[site]}", sys.executable, "pretrain_gpt.py"]
                process = subprocess.Popen(
                    [*command, *words, "--metrics-path", str(self.metrics)],
                    cwd=ROOT,
                    env=environment() | shared | own,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                self.processes.setdefault(site, []).append(process)

    def records(self) -> list[dict[str, Any]]:
        """Return the steps so far."""
        text = self.metrics.read_text() if self.metrics.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if "iteration_time_s" in line]

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is recorded."""
        while not (records := self.records()) or records[-1]["iteration"] < step:
            if any(each.poll() is not None for group in self.processes.values() for each in group):
                self.fail()
            time.sleep(0.05)

    def kill(self, site: int) -> None:
        """Kill the ranks of a site."""
        for process in self.processes[site]:
            process.send_signal(signal.SIGKILL)

    def wait(self) -> list[int]:
        """Wait for all ranks. Returns their exit codes."""
        return [process.wait() for group in self.processes.values() for process in group]

    def finish(self) -> list[dict[str, Any]]:
        """Wait for a success, and return the steps."""
        if any(self.wait()):
            self.fail()
        return self.records()

    def message(self, rank: int) -> list[str]:
        """Return the errors that a rank has printed."""
        lines = self.lines(rank)
        return [line for line in lines if line.startswith("error:")] or lines[-5:]

    def lines(self, rank: int) -> list[str]:
        """Return what a rank has printed."""
        return (self.folder / f"rank_{rank}.log").read_text(errors="replace").splitlines()

    def fail(self) -> None:
        """End the benchmark with what rank 0 says."""
        for group in self.processes.values():
            for process in group:
                process.kill()
        sys.exit("\n".join(["a training failed:", *self.message(0)]))


@dataclass(frozen=True)
class Figures:
    """Cost of one method."""

    seconds: float | None
    """Time of the steps until the loss was reached; None: it was not."""
    steps: int | None
    last_loss: float
    median_step: float
    kernel_bytes_a_step: float
    """Bytes that the kernel counted on the link in both directions, between the first and the last step."""


def measured(network: Network, ranks: int, words: Sequence[str]) -> tuple[list[dict[str, Any]], list[int]]:
    """Train. Returns the steps, and the bytes that each site has sent after the first."""
    with TemporaryDirectory(prefix="megalite-sites-") as folder:
        training = Training(network, range(SITES), ranks, words, Path(folder))
        training.wait_for_step(1)
        before = [network.sent(site) for site in range(SITES)]
        records = training.finish()
        return records, [network.sent(site) - each for site, each in enumerate(before)]


def time_to(loss: float, records: Sequence[dict[str, Any]], sent: Sequence[int]) -> Figures:
    """Return the figures of a training."""
    losses, times = ([float(each[name]) for each in records] for name in ("lm_loss", "iteration_time_s"))
    means = [sum(losses[at - SMOOTHED : at]) / SMOOTHED for at in range(SMOOTHED, len(losses) + 1)]
    steps = next((at + SMOOTHED for at, mean in enumerate(means) if mean <= loss), None)
    return Figures(
        seconds=None if steps is None else sum(times[:steps]),
        steps=steps,
        last_loss=means[-1],
        median_step=sorted(times)[len(times) // 2],
        kernel_bytes_a_step=sum(sent) / (len(records) - 1),
    )


def leaving(network: Network, ranks: int, words: Sequence[str]) -> dict[str, Any]:
    """Let a site leave and come back: kill its ranks, resume without it, and then with it.

    Alone, the other site is one replica, which needs no local updates: it goes on from the mean of both.
    """
    found: dict[str, Any] = {}
    with TemporaryDirectory(prefix="megalite-sites-") as folder:
        saved = ["--save", f"{folder}/run", "--save-interval", "10", "--resume", "auto"]

        def train(name: str, sites: Sequence[int], steps: int, method: Sequence[str]) -> Training:
            own = Path(folder) / name
            own.mkdir()
            return Training(network, sites, ranks, [*words, *saved, *method, "--train-iters", str(steps)], own)

        both = train("both", range(SITES), 60, LEAVES)
        both.wait_for_step(25)
        both.kill(1)
        killed = time.perf_counter()
        codes = both.wait()
        found["seconds until the other site's run has ended"] = time.perf_counter() - killed
        found["exit codes of the other site"] = codes[:ranks]
        found["its message"] = both.message(0)
        found["last step"] = both.records()[-1]["iteration"]
        for name, sites, steps, method in (("one site", [0], 40, []), ("both again", range(SITES), 60, LEAVES)):
            training = train(name, sites, steps, method)
            records = training.finish()
            found[name] = {
                "flags": " ".join(method),
                "steps": [records[0]["iteration"], records[-1]["iteration"]],
                "first and last loss": [records[0]["lm_loss"], records[-1]["lm_loss"]],
                "notes": [line for line in training.lines(0) if "replica" in line],
            }
    return found


def require_rights() -> None:
    """End with one line if this cannot run here."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        sys.exit(f"benchmarks.sites needs {', '.join(missing)}: install iproute2 and util-linux (Linux only)")
    try:
        Network("50mbit", 0.0).close()
    except subprocess.CalledProcessError as error:
        why = (error.stderr or "").strip().splitlines()[-1:] or [str(error)]
        sys.exit(f"benchmarks.sites needs root, and network namespaces, veth and tbf in the kernel: {why[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", default="50mbit", help="of the link, each way, as tc takes it")
    parser.add_argument("--latency", type=float, default=0.01, help="seconds, each way")
    parser.add_argument("--ranks", type=int, default=2, help="of each site")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--loss", type=float, default=6.2, help="to reach, as the mean of 10 steps")
    arguments = parser.parse_args()
    require_rights()
    data = (CORPUS_FLAGS if Path(f"{CORPUS}.idx").exists() else MOCK).split()
    data = [str(Path(word).resolve()) if word.startswith("run/") else word for word in data]
    words = [*SMALL_MODEL.split(), "--micro-batch-size", "2", *data]
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "load before": os.getloadavg()[0],
        "data": "corpus of make train" if "--data-path" in words else "mock data",
        "rate": arguments.rate,
        "ranks per site": arguments.ranks,
    }
    network = Network(arguments.rate, arguments.latency)
    try:
        results["latency"] = f"{arguments.latency} s each way, by {network.latency}"
        figures: dict[str, Figures] = {}
        for name, flags in METHODS.items():
            steps = arguments.steps * LONGER.get(name, 1)
            course = [*words, *flags.split(), "--train-iters", str(steps)]
            figures[name] = time_to(arguments.loss, *measured(network, arguments.ranks, course))
            results[f"to a loss of {arguments.loss}"] = {key: vars(each) for key, each in figures.items()}
            print(name, figures[name], flush=True)
        counted = {}
        for name, flags in COUNTED.items():
            records, sent = measured(network, 1, [*words, *flags.split(), "--train-iters", "21"])
            own = sum(each["bytes_sent"] for each in records[1:])
            counted[name] = {"bytes_sent": own, "kernel": sent[0], "kernel / bytes_sent": sent[0] / own}
            print(name, counted[name], flush=True)
        results["bytes that site 0 sent in 20 steps, one rank per site"] = counted
        results["a site leaves and comes back"] = leaving(network, arguments.ranks, words)
        print(json.dumps(results["a site leaves and comes back"], indent=1))
    finally:
        network.close()
    plain = figures[PLAIN]
    results["time to the loss, as a share of plain data parallelism's"] = ratios = {
        name: each.seconds / plain.seconds if each.seconds and plain.seconds else None for name, each in figures.items()
    }
    for name, ratio in ratios.items():
        print(f"{name:28} {'not reached' if ratio is None else f'{ratio:.2f}'}")
    print("written to", write_results("sites", results))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with suppress(KeyboardInterrupt):
        main()

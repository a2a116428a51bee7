"""Fuzz what reads the files and lines of strangers.

    python -m tests.fuzz --seconds 60 --kind yaml flags
    python -m tests.fuzz --replay tests/fuzz/corpus/yaml-0.json
    python -m tests.fuzz --tree ../older --seconds 300

What is found is printed, and kept below --keep as files that --replay takes; those for good lie in tests/fuzz/corpus.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1") | {
    "HF_HUB_OFFLINE": "1"
}
ROOT = Path(__file__).parents[2]


def main() -> int:
    """Parse, import once what all inputs need, and try them."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long, samples apart")
    parser.add_argument("--inputs", type=int, help="how many of each kind, at most")
    parser.add_argument("--kind", nargs="*", help="some kinds, not all")
    parser.add_argument("--seed", default=str(time.time_ns()), help="what inputs are drawn from; by default the time")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes; by default the cores"
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="the tree whose megalite is tried; by default this one")
    parser.add_argument("--keep", type=Path, default=ROOT / "run" / "fuzz", help="where findings are kept")
    parser.add_argument("--report", action="store_true", help="end with 0 whatever is found")
    parser.add_argument("--replay", nargs="+", type=Path, help="try these findings instead")
    arguments = parser.parse_args()
    tree = str(arguments.tree.resolve())
    sys.path[:0] = [tree, f"{tree}/kernels"]
    from tests.fuzz import campaign, child
    from tests.fuzz.programs import TREE, warm

    if str(TREE) != tree:
        parser.error(f"--tree {tree} has no megalite")
    if unknown := set(arguments.kind or ()) - set(campaign.NAMES):
        parser.error(f"--kind {' '.join(sorted(unknown))}: there are {' '.join(campaign.NAMES)}")
    warm()
    child.adopt_orphans()
    with campaign.scratch() as folder:
        samples = campaign.Samples(folder / "samples")
        if arguments.replay:
            return replay(arguments.replay, samples, folder)
        kinds = arguments.kind or campaign.NAMES
        print(f"seed {arguments.seed}, {arguments.jobs} processes, {', '.join(kinds)}", flush=True)
        tried, findings = campaign.campaign(
            kinds, arguments.seed, arguments.seconds, arguments.inputs, arguments.jobs, samples, folder
        )
    print(f"{'kind':12} inputs  a second  findings")
    for kind, (count, seconds) in tried.items():
        found = sum(finding.kind == kind for finding in findings)
        print(f"{kind:12} {count:6}  {count * arguments.jobs / max(seconds, 1e-9):8.1f}  {found:8}")
    arguments.keep.mkdir(parents=True, exist_ok=True)
    for finding in findings:
        path = arguments.keep / f"{finding.kind}-{finding.seed}-{finding.number}.json"
        path.write_text(finding.corpus_entry())
        print(f"\n{path}\nafter {finding.second:.0f} s: {finding.fault}: {finding.place}")
        print(f"  {json.dumps(finding.edits)[:600]}")
        print("".join(f"  | {line}\n" for line in finding.output.strip().splitlines()[-6:]), end="")
    return 1 if findings and not arguments.report else 0


def replay(paths: list[Path], samples: object, folder: Path) -> int:
    """Try findings again; returns 1 where one still shows a fault."""
    from tests.fuzz import campaign

    faults = 0
    for path in paths:
        entry = json.loads(path.read_text())
        outcome = campaign.try_input(entry["kind"], entry["edits"], samples, folder / "replay")  # type: ignore[arg-type]
        faults += outcome.fault is not None
        said = (outcome.output.strip().splitlines() or [""])[-1][:200]
        print(f"{path.name}: {outcome.fault or 'passed'} {outcome.place} ({outcome.seconds:.2f} s) {said}")
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())

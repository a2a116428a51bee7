"""Runs the tests marked `bits`, but the wide, with each width of vector instructions that torch can use here:
`make test-bits`. WIDEST= leaves out the widest, which torch takes by itself, and so every other run of these tests.

On another CPU the same code adds in another order; what is promised to have the same bits has them there, too.
"""

from __future__ import annotations

import os
import subprocess
import sys

VARIABLE = "ATEN_CPU_CAPABILITY"
CAPABILITIES = ("default", "avx2", "avx512")  # from narrow to wide


def supported() -> list[str]:
    """The capabilities that this CPU has, as torch finds where nothing forces it: a wider one would crash."""
    program = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, "-c", program]
    widest = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    name = widest.strip().lower()
    return list(CAPABILITIES[: CAPABILITIES.index(name) + 1]) if name in CAPABILITIES else ["default"]


def main() -> None:
    failed = []
    here = supported()
    for capability in CAPABILITIES if os.environ.get("WIDEST", "1") else here[:-1]:
        if capability not in here:
            print(f"NOT RUN: {VARIABLE}={capability}, which this CPU has not", flush=True)
            continue
        print(f"{VARIABLE}={capability}", flush=True)
        command = [sys.executable, "-m", "pytest", *sys.argv[1:], "-m", "bits and not wide and not slow"]
        if subprocess.run(command, env=os.environ | {VARIABLE: capability}, check=False).returncode:
            failed.append(capability)
    if failed:
        sys.exit(f"other bits with {VARIABLE}={', '.join(failed)}")


if __name__ == "__main__":
    main()

"""Compile every kernel for GPUs that this machine need not have, and fail on what would make it slow there.

    make compile-kernels

The operations run on the meta device at the shapes of `megalite_kernels.cases`, and each launch is compiled instead:
for NVIDIA's sm_80 (A100), sm_90 (H100, H200) and sm_100 (B200), and AMD's gfx942 (MI300); products in 8 bits for
sm_89 (L40, RTX 4090), sm_90 and sm_100, since `scaled_products.refusal` refuses the others. Prints registers, spills,
shared memory and the share of global memory traffic in accesses of 128 bits. Fails on spills, on arithmetic in float64
(as torch.compile passes a number of Python's, so it is passed here), on narrow accesses, and on a launch that is
compiled anew where the number of tokens changes. Needs Triton and no GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megalite_kernels import launch
from megalite_kernels.case import Case
from megalite_kernels.cases import cases
from megalite_kernels.implementation import Kernels, use
from megalite_kernels.product_cases import product_cases

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
WITH_FP8 = ("sm_89", "sm_90", "sm_100")
# What changes from batch to batch, and must change no kernel. (No tensor takes 2 GiB: there AMD's addresses grow.)
TOKENS = (2048, 2047, 1)
WIDE = 0.75  # of the bits; the rest are a row's statistics, and what a program does once
HEADER = f"{'operation':42} {'kernel':20} {'target':7} registers spills shared wide"


@dataclass(frozen=True)
class Compiled:
    """Properties of a binary: registers per thread, and bytes of spills and shared memory per program."""

    operation: str
    kernel: str
    target: str
    registers: int
    spills: int
    shared: int
    wide: float  # share of the bits of global memory that accesses of 128 bits or more move
    doubles: int  # instructions
    indexed: bool  # some accesses are of single numbers

    def faults(self) -> list[str]:
        found = [f"{self.spills} bytes of spills"] if self.spills else []
        found += [f"{self.doubles} float64 instructions"] if self.doubles else []
        return found + ([f"{self.wide:.0%} of 128-bit accesses"] if self.wide < WIDE and not self.indexed else [])

    def __str__(self) -> str:
        row = f"{self.operation:42} {self.kernel:20} {self.target:7} {self.registers:9} {self.spills:6} {self.shared:6}"
        return " ".join([f"{row} {self.wide:4.0%}", *(f" <- {fault}" for fault in self.faults())])


class _Driver:
    """Part of a GPU's driver that compilation needs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.name]

    def get_current_device(self) -> str:
        return self.name  # a launch looks for its kernels under the device

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


def compile_only(name: str) -> list[Any]:
    """Let launches in this process only compile, for the target of this name. Returns the list of compiled kernels."""
    use(Kernels("triton", meta_is_gpu=True))
    launch.LANES = TARGETS[name].warp_size
    driver.set_active(_Driver(name))
    launched: list[Any] = []
    run, pack = JITFunction.run, JITFunction._pack_args

    def compile_instead(function: Any, *args: Any, **kwargs: Any) -> None:
        launched.append(run(function, *args, **kwargs | {"warmup": True}))

    def pack_doubles(function: Any, *args: Any) -> tuple[Any, ...]:
        options, signature, *rest = pack(function, *args)
        return options, {name: "fp64" if kind == "fp32" else kind for name, kind in signature.items()}, *rest

    JITFunction.run, JITFunction._pack_args = compile_instead, pack_doubles
    return launched


def inspect(kernel: Any, case: Case, target: str) -> Compiled:
    name = kernel.metadata.name.strip("_")
    shared = kernel.metadata.shared
    if "cubin" not in kernel.asm:
        text = kernel.asm["amdgcn"]
        read = partial(_number, text)
        spills = read(r"\.vgpr_spill_count:\s+(\d+)") * 4 + read(r"\.private_segment_fixed_size:\s+(\d+)")
        bits = _amd_accesses(text)
        doubles = len(re.findall(r"\bv_(?:add|mul|fma|div_\w+|rcp|rsq|sqrt|cmp_\w+|max|min)_f64", text))
        registers = read(r"\.vgpr_count:\s+(\d+)")
        return Compiled(case.name, name, target, registers, spills, shared, _wide(bits), doubles, case.indexed)
    text = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.check_output([tool, "--dump-resource-usage", file.name], text=True)
    spills = _number(usage, r"STACK:(\d+)") + _number(usage, r"LOCAL:(\d+)")
    accesses = re.findall(r"\b(?:ld|st)\.global(?:\.[a-zA-Z]\w*(?:::\w+)*)*?(?:\.v(\d))?\.[a-z](\d+)", text)
    bits = [int(count or 1) * int(size) for count, size in accesses]
    doubles = len(re.findall(r"\b(?:add|sub|mul|fma|div|rcp|sqrt|rsqrt|max|min|setp)\.[\w.]*f64", text))
    registers = _number(usage, r"REG:(\d+)")
    return Compiled(case.name, name, target, registers, spills, shared, _wide(bits), doubles, case.indexed)


def _number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"the compiler says no {pattern}"
    return int(found[1])


def _amd_accesses(text: str) -> list[int]:
    words = re.findall(r"\b(?:global|buffer)_(?:load|store)_(dword(?:x\d)?|\w*byte\w*|\w*short\w*)", text)
    return [32 * int(word[6:] or 1) if word.startswith("dword") else 16 if "short" in word else 8 for word in words]


def _wide(bits: list[int]) -> float:
    return sum(size for size in bits if size >= 128) / max(sum(bits), 1)


def launch_all(case: Case, tokens: int) -> None:
    """Forward and backward, on empty tensors."""
    outputs = case.outputs(case.make_inputs(tokens, "meta"))
    outputs = tuple(output for output in outputs if output.requires_grad)
    if outputs:
        torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])


def cases_of(target: str) -> Iterator[Case]:
    """Yield what to compile for a target. On sm_89 these are products in 8 bits: for the rest sm_80 stands."""
    if target != "sm_89":
        yield from cases()
    if target in WITH_FP8:
        yield from product_cases()


def compile_target(target: str, only: str = "") -> tuple[list[Compiled], list[str]]:
    """All launches of one target, of cases with this in their name, and what is wrong with them. Runs in a process of
    its own.
    """
    launched, found, faults = compile_only(target), [], []
    for case in (case for case in cases_of(target) if only in f"{case.operation} {case.name}"):
        variants = []
        for tokens in TOKENS:
            launched.clear()
            launch_all(case, tokens)
            variants.append([kernel.hash for kernel in launched])
            if len(variants) == 1:
                found += [inspect(kernel, case, target) for kernel in launched]
        if any(variant != variants[0] for variant in variants):
            faults.append(f"{case.name} on {target} is compiled anew for another number of tokens")
    faults += [f"{row.operation} {row.kernel} on {row.target}: {fault}" for row in found for fault in row.faults()]
    return found, faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes; one target each")
    parser.add_argument("--only", default="", help="a part of the operation's file or of the case's name")
    arguments = parser.parse_args()
    start, wrong = time.monotonic(), []
    print(HEADER, flush=True)
    with multiprocessing.get_context("spawn").Pool(arguments.workers, maxtasksperchild=1) as pool:
        for rows, faults in pool.imap(partial(compile_target, only=arguments.only), arguments.targets, chunksize=1):
            print("\n".join(map(str, rows)), flush=True)
            wrong += faults
    print(f"{time.monotonic() - start:.0f} s")
    if wrong:
        sys.exit("\n".join([f"{len(wrong)} faults:", *wrong]))


if __name__ == "__main__":
    main()

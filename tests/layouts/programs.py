"""Runs of a draw by its program, and the verdict on what it recorded."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.conversion.families import FAMILIES
from megalite.conversion.family import choose
from megalite.extras.verify.batches import StepBatches
from megalite.extras.verify.checkpoints import open_weights
from megalite.extras.verify.command import Command, read_command
from megalite.extras.verify.own_run import StepTraces
from megalite.extras.verify.readers.reading import read_trace
from megalite.extras.verify.trace import Trace
from megalite.extras.verify.verdict import Verdict
from megalite.extras.verify.verification import verify
from megalite.parallel.mesh import ParallelMesh
from megalite.training.data import open_data
from megalite.training.display import Display
from megalite_trace import Recorder
from museum import cases
from museum.cases import MissingProgram
from museum.megatron import How, Run
from museum.plain.settings import Settings
from museum.trainer import Patches, run
from tests.harness.gpt_trainer import gpt_trainer
from tests.harness.rank_pool import RankPools
from tests.layouts.draws import Draw

MEGATRON, TORCHTITAN = "0.19.2", "torchtitan==0.3.0"


@dataclass
class Programs:
    """Pools of ranks, and the interpreter that has torchtitan, for the programs to run with."""

    pools: RankPools = field(default_factory=RankPools)
    torchtitan: Path | None = None

    def verdict(self, draw: Draw, folder: Path) -> Verdict:
        """Run a draw in a folder, which keeps its files, and return the verdict on what it recorded."""
        return _VERDICTS[draw.program](draw, folder, self)


def interpreter(program: str, torchtitan: Path | None) -> Path:
    """Return the Python that judges a program's runs. Raises MissingProgram if the program is not installed."""
    if program == "torchtitan" and torchtitan is None:
        raise MissingProgram(
            f"give --python (TITAN= of make) an interpreter that has it: python3.11 -m venv titan && "
            f"titan/bin/pip install torch==2.13.0 {TORCHTITAN} triton"
        )
    if program != "megatron" or version("megatron-core") == MEGATRON:
        return Path(sys.executable)
    return Path(cases.interpreter())


def _verified(folder: Path, text: str, checkpoint: Path, trace: Trace, batches: StepBatches | None = None) -> Verdict:
    """Return the verdict on a trace; the command stays in the folder, for `megalite-verify`."""
    (folder / "COMMAND.txt").write_text(f"{text}\n")
    command = read_command(text)
    return verify(command, open_weights(str(checkpoint), command.config.model), trace, batches)


# ------------------------------------------------------------------------------------------------ megatron-core


def _megatron(draw: Draw, folder: Path, programs: Programs) -> Verdict:
    run = Run(draw.text, draw.ranks, folder, draw.masked, draw.weights_seed % 100_000)
    weights = run.prepare()
    how: How = draw.how  # type: ignore[assignment]
    trace = read_trace(run.record(programs.pools, weights, how), None)
    if how == "logs":
        rows = (folder / "metrics.jsonl").read_text().splitlines()
        trace.figures = {name: value for name, value in json.loads(rows[0]).items() if name != "step"}
    return _verified(folder, run.text, weights, trace, run.batches(trace) if how == "logs" else None)


# ------------------------------------------------------------------------------------------------ the plain trainer


def plain(draw: Draw, folder: Path, patches: Patches | None = None) -> Verdict:
    """Return the verdict on a run of the plain trainer, with some of its functions replaced."""
    run(Settings(**draw.flags), folder, patches)
    return _verified(
        folder, (folder / "command.txt").read_text(), folder / "checkpoint", read_trace(folder / "trace", None)
    )


# ------------------------------------------------------------------------------------------------ megalite


def _megalite(draw: Draw, folder: Path, programs: Programs) -> Verdict:
    """Judge the second step: the first one has left no weight at its initial value."""
    flags = f"{draw.text} --seed {draw.weights_seed % 100_000}"
    programs.pools(draw.ranks).run(_two_steps, f"{flags} {'--trace-whole' if draw.how == 'whole' else ''}", folder)
    text = f"torchrun --nproc-per-node {draw.ranks} megalite-pretrain {flags}"
    return _verified(folder, text, folder / "iter_0000001", read_trace(folder / "trace", 2))


def _two_steps(flags: str, folder: Path) -> None:
    """Train two steps on this rank, save after the first one, and trace the second one."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    config = resolve(parse_arguments([*shlex.split(flags), "--save", str(folder), "--trace-steps", "2"]).config, size)
    mesh = ParallelMesh(rank=rank, world_size=size, **config.parallel.mesh_sizes)
    trainer = gpt_trainer(config, open_data(config), mesh, folder)
    traced = StepTraces(trainer)
    with trainer.loader:
        traced(trainer.step)
        trainer.save(Display(2, 100, enabled=False), last=False)
        traced(trainer.step)


# ------------------------------------------------------------------------------------------------ transformers


def _transformers(draw: Draw, folder: Path, programs: Programs) -> Verdict:
    text = f"pretrain_gpt.py {draw.text}"
    command = read_command(text)
    torch.manual_seed(draw.weights_seed)
    model = _of_transformers(command)
    model.save_pretrained(folder / "checkpoint")  # type: ignore[operator]
    recorder = Recorder(folder / "trace", model, steps={1}, program="huggingface", whole=draw.how == "whole")
    batches = _batches(command, draw)
    with recorder.step(1):
        total = 0.0
        for tokens, labels, mask in batches:
            recorder.batch(tokens=tokens, labels=labels, loss_mask=mask)
            losses = F.cross_entropy(model(tokens).logits.float().flatten(0, 1), labels.flatten(), reduction="none")
            loss = (losses * mask.flatten()).sum() / mask.sum() / len(batches)
            loss.backward()
            total += loss.item()
        recorder.gradients()
        recorder.figures(loss=total, grad_norm=nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    return _verified(folder, text, folder / "checkpoint", read_trace(folder / "trace", 1))


def _of_transformers(command: Command) -> nn.Module:
    """Return the network of a command with random weights, none of which is at its initial value."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = command.config.model
    _, keys = choose(FAMILIES, config)
    own = AutoConfig.for_model(keys["model_type"], **{name: keys[name] for name in keys.keys() - _OF_THE_CLASS})
    model: nn.Module = AutoModelForCausalLM.from_config(own, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "norm" in name or ".ln_" in name
            parameter.copy_(torch.randn_like(parameter) * (0.1 if norm else 0.2) + (1.0 if norm else 0.0))
    return model.to(torch.bfloat16 if command.config.training.bf16 else torch.float32)


_OF_THE_CLASS = {"model_type", "architectures"}


def _batches(command: Command, draw: Draw) -> Sequence[tuple[Tensor, Tensor, Tensor]]:
    """Return tokens, labels and masks of each micro-batch, [samples, sequence] each."""
    training, length, vocabulary = (
        command.config.training,
        command.config.data.seq_length,
        command.config.model.vocab_size,
    )
    assert training.global_batch_size is not None
    assert length is not None
    assert vocabulary is not None
    generator = torch.Generator().manual_seed(draw.weights_seed)
    tokens = torch.randint(vocabulary, (training.global_batch_size, length + 1), generator=generator)
    mask = torch.rand(len(tokens), length, generator=generator) < (0.6 if draw.masked else 2.0)
    parts = (each.split(training.micro_batch_size) for each in (tokens[:, :-1], tokens[:, 1:], mask.float()))
    return list(zip(*parts, strict=True))


# ------------------------------------------------------------------------------------------------ torchtitan


def _torchtitan(draw: Draw, folder: Path, programs: Programs) -> Verdict:
    script = Path(__file__).with_name("titan_step.py")
    flags = draw.flags | {"seed": draw.weights_seed, "whole": draw.how == "whole"}
    command: list[Any] = [programs.torchtitan]
    if draw.ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", draw.ranks]
    ran = subprocess.run(
        [*map(str, command), script, folder, json.dumps(flags)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"torchtitan ended with {ran.returncode}: {ran.stderr.strip()[-20_000:]}")
    return _verified(folder, _command_of_titan(draw), folder / "dcp", read_trace(folder / "trace", 1))


def _command_of_titan(draw: Draw) -> str:
    """Return the command of Megatron-LM that describes a draw's network and layout."""
    of, ranks = draw.flags, draw.ranks
    size = of["samples"] // of["dp"]
    llama = of["model"] == "llama3"
    words = f"""torchrun --nproc-per-node {ranks} pretrain_gpt.py --num-layers {of["layers"]} --hidden-size 64
        --num-attention-heads 4 --kv-channels 16 --ffn-hidden-size 96 --group-query-attention
        --num-query-groups {of["groups"]} --swiglu --normalization RMSNorm --position-embedding-type rope
        --rotary-base {500000 if llama else 1000000} {"--use-rope-scaling" if llama else "--qk-layernorm"}
        --norm-epsilon {1e-5 if llama else 1e-6} --disable-bias-linear --untie-embeddings-and-output-weights
        --tokenizer-type NullTokenizer --vocab-size 256 --make-vocab-size-divisible-by 1 --mock-data --lr 1e-3
        --seq-length {of["length"]} --max-position-embeddings {of["length"]} --train-iters 1 --micro-batch-size {size}
        --global-batch-size {of["samples"] * of["micro-batches"]} --hidden-dropout 0 --attention-dropout 0
        --tensor-model-parallel-size {of["tp"]} --calculate-per-token-loss"""
    words += " --sequence-parallel" if of["tp"] > 1 and not of["no-sp"] else ""
    return " ".join(words.split()) + (" --bf16" if of["dtype"] == "bfloat16" else "")


_VERDICTS: Mapping[str, Callable[[Draw, Path, Programs], Verdict]] = {
    "megatron": _megatron,
    "plain": lambda draw, folder, _: plain(draw, folder),
    "megalite": _megalite,
    "transformers": _transformers,
    "torchtitan": _torchtitan,
}

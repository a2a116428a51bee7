"""Capabilities meet in pairs: each is refused by the flags of both, or trains on two ranks what it trains on one.

The factors of an array that covers all pairs are those of whole runs, by their flags: what is trained, with which
operands, data and losses, and what must change no number. Beside any other, each of the former changes the training.
"""

from __future__ import annotations

import json
import random
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megalite.config import parse_arguments, resolve
from megalite.config.fields import flag_of
from megalite.config.idle_flags import without_idle_flags
from megalite.config.run import RunConfig
from megalite.entry_points import entry_point
from megalite.errors import ConfigurationError
from megalite.parallel.mesh import ParallelMesh
from megalite.run.run import make_trainer
from megalite.tasks.gpt_task import GPTTask
from megalite.training.data import open_data
from megalite.training.display import Display
from tests.distributed.layout_expected import Tensors, assemble
from tests.distributed.layout_run import Held, held, held_means
from tests.harness.close import assert_number_close, assert_parameter_close
from tests.harness.covering_array import Row, covering_array
from tests.harness.fork_server import RankFailure
from tests.harness.host_arena import host_arena
from tests.harness.rank_pool import RankPools
from tests.harness.unsharded import unsharded_parameters

BASE = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --init-method-std 0.1 --make-vocab-size-divisible-by 2
    --tokenizer-type ByteTokenizer --seq-length 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 9 --fp64
    --eval-iters 0 --num-workers 0 --lr 0.2 --lr-decay-style constant"""
LLAMA = """--kv-channels 64 --ffn-hidden-size 256 --position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear"""
LORA = "--lora-rank 2"
MOE = "--num-experts 4 --moe-ffn-hidden-size 128 --moe-layer-freq [0,1,1,1]"
MLA = """--multi-latent-attention --rope-type rope --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 64
    --v-head-dim 64"""
GDN = """--hybrid-layer-pattern G-*- --linear-num-key-heads 4 --linear-num-value-heads 4 --linear-key-head-dim 8
    --linear-value-head-dim 8 --linear-chunk-size 16"""
OVERLAP = "--overlap-grad-reduce --ddp-bucket-size 3000"
MODULES = "--offload-modules attn_norm qkv_linear core_attn attn_proj"
EIGHT = "--fp8-format e4m3 --fp8-recipe"
VALUES: dict[str, dict[str, str]] = {
    "layout": {
        "dp2": "",
        "tp2": "--tp 2",
        "tp2-sp": "--tp 2 --sequence-parallel",
        "cp2": "--cp 2",
        "pp2, interleaved": "--pp 2 --num-layers-per-virtual-pipeline-stage 1",
        "pp2, zb-h1": "--pp 2 --pipeline-schedule zb-h1",
        "pp2, zb-v": "--pp 2 --pipeline-schedule zb-v",
        "ep2": "--ep 2",
    },
    "sharding": {
        "zero0": "",
        "zero1": "--data-parallel-sharding-strategy optim",
        "zero2": "--data-parallel-sharding-strategy optim_grads",
        "zero3": "--data-parallel-sharding-strategy optim_grads_params",
    },
    "overlap": {"": "", "reduce": OVERLAP, "gather": f"{OVERLAP} --overlap-param-gather"},
    "recompute": {
        "": "",
        "selective": "--recompute-granularity selective",
        "experts": "--recompute-granularity selective --recompute-modules core_attn moe",
        "uniform": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    },
    "parts": {"": "", "parts": "--mlp-chunks-for-training 3"},
    "logits": {"": "", "fused": "--fused-linear-cross-entropy"},
    "host": {
        "": "",
        "optimizer": "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --overlap-cpu-optimizer-d2h-h2d",
        "slices": "--optimizer-cpu-offload --parameter-offload",
    },
    "activations": {
        "": "",
        "layers": "--cpu-offloading-num-layers 1",
        "modules": f"--fine-grained-activation-offloading --min-offloaded-tensor-size 0 {MODULES}",
    },
    "codes": {"": "", "gathered": "--fp8-param-gather"},
    "dispatcher": {"": "", "alltoall": "--moe-token-dispatcher-type alltoall"},
    "network": {
        "llama": LLAMA,
        "sandwich": f"{LLAMA} --sandwich-norm --attention-output-gate --softmax-type learnable",
        "experts": f"{LLAMA} {MOE}",
        "latents": f"{LLAMA} {MLA}",
        "recurrent": f"{LLAMA} {GDN}",
    },
    "adapters": {
        "": "",
        "lora": LORA,
        "dora": f"{LORA} --use-dora",
        "lora, dropout": f"{LORA} --lora-dropout 0.3",
        "lora, tables": f"{LORA} --lora-target-modules down lm_head embed_tokens --untie-embeddings-and-output-weights",
    },
    "frozen": {"": "", "freeze": "--freeze layers.0.*"},
    "teacher": {"": "", "distill": "--distill-from {folder}/iter_0000002"},
    "data": {
        "mock": "--mock-data",
        "documents": "--mock-data --reset-position-ids --reset-attention-mask --eod-mask-loss",
        "preferences": "--preference-data {folder}/pairs.jsonl --reference-model {folder}/iter_0000002",
    },
    "rounding": {
        "": "",
        "tensorwise": f"{EIGHT} tensorwise",
        "blockwise": f"{EIGHT} blockwise",
        "mxfp8": f"{EIGHT} mxfp8",
        "nvfp4": "--fp4-format e2m1",
    },
    "weight gradients": {"": "", "fp8-wgrad": "--fp8-wgrad"},
    "kept": {"": "", "in 8 bits": "--activation-func-fp8-input-store"},
    "depths": {
        "": "",
        "depths": "--mtp-num-layers 2 --mtp-use-repeated-layer",
        "detached": "--mtp-num-layers 1 --mtp-detach-heads",
    },
    "loss": {"": "", "terms": "--label-smoothing 0.1 --z-loss-coeff 0.02"},
    "dropout": {
        "": "--hidden-dropout 0 --attention-dropout 0",
        "dropout": "--hidden-dropout 0.1 --attention-dropout 0.1",
    },
    "mean": {"": "", "ema": "--ema-decay 0.5"},
    "clip": {"": "", "qk-clip": "--qk-clip --qk-clip-threshold 0.01"},
    "optimizer": {"sgd": "--optimizer sgd", "muon": "--optimizer muon"},
}
SAME = ("layout", "sharding", "overlap", "recompute", "parts", "logits", "host", "activations", "codes", "dispatcher")
"""Factors that must not change the training."""
KNOWN = ("network", "rounding", "weight gradients", "kept", "optimizer")
"""Factors whose effects beside one another are compared with the oracle elsewhere."""
One = tuple[str, str]
"""A capability: a factor and its value."""
NEEDS: dict[One, Row] = {
    ("layout", "ep2"): {"network": "experts"},
    ("overlap", "gather"): {"sharding": "zero1"},
    ("recompute", "experts"): {"network": "experts"},
    ("host", "slices"): {"sharding": "zero3"},
    ("codes", "gathered"): {"rounding": "blockwise", "sharding": "zero3"},
    ("dispatcher", "alltoall"): {"network": "experts"},
    ("weight gradients", "fp8-wgrad"): {"rounding": "mxfp8"},
    ("kept", "in 8 bits"): {"rounding": "mxfp8"},
}
"""Values that a capability is given with, where a row does not say."""
PLAIN: Row = {factor: next(iter(values)) for factor, values in VALUES.items()}
ONES: list[One] = [(factor, value) for factor, values in VALUES.items() for value in values if value != PLAIN[factor]]
PAIRS = [(one, other) for one, other in combinations(ONES, 2) if one[0] != other[0]]
LR, STEPS, PARTS = 0.2, 2, 16


def with_needs(row: Row) -> Row:
    for one in tuple(row.items()):
        row = NEEDS.get(one, {}) | row
    return row


def flags(row: Row, folder: Path) -> str:
    return " ".join([BASE, *(VALUES[name][value] for name, value in (PLAIN | row).items())]).format(folder=folder)


@cache
def parsed(*ones: One) -> RunConfig:
    return parse_arguments(shlex.split(flags(dict(ones), Path("x")))).config


@cache
def changes(one: One) -> dict[One, Any]:
    """Return the fields that a capability's flags change, by section and name."""

    def every(config: RunConfig) -> dict[One, Any]:
        sections = {section.name: getattr(config, section.name) for section in fields(config)}
        return {(name, of.name): getattr(each, of.name) for name, each in sections.items() for of in fields(each)}

    plain = every(parsed())
    return {field: value for field, value in every(parsed(one)).items() if value != plain[field]}


@cache
def problem(row: frozenset[One]) -> str | None:
    """Return why the run of a row is refused, or which flags change nothing in it; None: it trains by all of them.

    Each capability's flags are parsed once for all rows.
    """
    config = parsed()
    for one in row:
        for (section, name), value in changes(one).items():
            config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    try:
        resolve(config, 2)
    except ConfigurationError as error:
        return str(error)
    return "\n".join(without_idle_flags(config)[1]) or None


def refusal(row: Row) -> str | None:
    return problem(frozenset(one for one in with_needs(row).items() if one[1] != PLAIN[one[0]]))


def possible(row: Row) -> bool:
    """Tell whether a row is that of a run. Of an incomplete one, all that is there is read before what is not."""
    given = {name: row[name] for name in VALUES if name in row}
    blocks = given.get("weight gradients") == "fp8-wgrad" and given.get("rounding") in ("mxfp8", "blockwise")
    if blocks and given.get("layout") == "cp2":
        return False  # blocks along tokens that context-parallel ranks cut (docs/low_precision.md)
    return refusal(given) is None and all(row[name] in VALUES[name] for name in VALUES)


@cache
def rows(seed: int = 1) -> list[Row]:
    """Return rows with each pair that is not refused, and each kind of adapter in each network, in parts or not."""
    factors = {factor: tuple(values) for factor, values in VALUES.items()}
    return covering_array(factors, possible, ("network", "adapters", "parts"), seed=seed, candidates=3)


def test_a_pair_is_accepted_or_refused_by_the_flags_of_both() -> None:
    def named(one: One, other: One) -> set[str]:
        """Return the flags of a capability and its needs, and of the other's needs in whose place it is."""
        ones = [one, *NEEDS.get(one, {}).items(), *((f, v) for f, v in NEEDS.get(other, {}).items() if f == one[0])]
        return {flag_of(name) for each in ones for _, name in changes(each)}

    assert not [(one, found) for one in ONES if (found := refusal(dict([one]))) is not None]
    for one, other in PAIRS:
        if (found := refusal(dict([one, other]))) is not None:
            lines = [set(re.findall(r"--[a-z0-9-]+", line)) for line in found.splitlines()]
            assert any(line & named(one, other) and line & named(other, one) for line in lines), (one, other, found)


@pytest.mark.wide
def test_each_pair_that_is_accepted_is_in_a_row() -> None:
    there = {pair for row in rows() for pair in combinations(row.items(), 2)}
    assert not [pair for pair in PAIRS if pair not in there and possible(PLAIN | with_needs(dict(pair)))]


# ------------------------------------------------------------------------------------------------ runs of rows


@dataclass(frozen=True)
class Trained:
    """Result of a rank: losses and gradient norm of each step, and boxes of the weights and of their means."""

    figures: list[dict[str, float]]
    weights: list[Held]
    means: list[Held]


def train(text: str, steps: int, save: Path | None = None) -> Trained:
    """Train on this rank by flags, as a run does."""
    rank, size = dist.get_rank(), dist.get_world_size()
    config = resolve(parse_arguments(shlex.split(text)).config, size)
    mesh = ParallelMesh(rank=rank, world_size=size, **config.parallel.mesh_sizes)
    make_task = entry_point("preference_task") if config.data.preference_data else GPTTask
    task = make_task(config, open_data(config), mesh)
    trainer = make_trainer(config, task, mesh, save)
    task.begin(trainer)
    with trainer.loader, host_arena():
        metrics = [trainer.step() for _ in range(steps)]
    if save is not None:
        trainer.save(Display(steps, 100, enabled=False), last=True)
    figures, means = [{**each.losses, "norm": each.grad_norm} for each in metrics], held_means(trainer.optimizer)
    with unsharded_parameters(trainer.optimizer):
        return Trained(figures, held(trainer.network, mesh, lambda parameter: parameter), means)


def tensors(ranks: Sequence[Trained]) -> Tensors:
    means = assemble(rank.means for rank in ranks)
    return assemble(rank.weights for rank in ranks) | {f"mean of {name}": mean for name, mean in means.items()}


@pytest.fixture(scope="module")
def folder(rank_pools: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with pairs of responses, and a network that is the teacher and the reference."""
    folder, draw = tmp_path_factory.mktemp("capabilities"), random.Random(3)
    texts = [["".join(draw.choices("abcdef ", k=draw.randint(2, 9))) for _ in range(3)] for _ in range(40)]
    records = (dict(zip(("prompt", "chosen", "rejected"), each, strict=True)) for each in texts)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rank_pools(1).run(train, f"{flags({}, folder)} --seed 7 --save {folder}", STEPS, folder)
    return folder


def shown(row: Row) -> str:
    return ", ".join(value for factor, value in row.items() if value != PLAIN[factor])


def differences(row: Row, folder: Path, rank_pools: RankPools) -> Iterator[str]:
    """Yield what a row's training on two ranks differs in from the same on one, without what must not change it."""
    alone = {factor: value for factor, value in row.items() if factor not in SAME}
    try:
        (expected,) = rank_pools(1).run(train, flags(alone, folder), STEPS)
        found = rank_pools(2).run(train, flags(row, folder), STEPS)
    except RankFailure as failure:
        yield str(failure)
        return
    ours, theirs = tensors(found), tensors([expected])
    assert ours.keys() == theirs.keys(), shown(row)
    for rank in found:
        for step, (figures, wanted) in enumerate(zip(rank.figures, expected.figures, strict=True)):
            assert figures.keys() == wanted.keys(), shown(row)
            for name, value in wanted.items():
                yield from difference(assert_number_close, figures[name], value, f"{name} of step {step}")
    for name, tensor in theirs.items():
        yield from difference(assert_parameter_close, ours[name], tensor, LR, name)


def difference(check: Any, *arguments: Any) -> Iterator[str]:
    try:
        check(*arguments)
    except AssertionError as error:
        yield str(error)


@pytest.mark.wide
@pytest.mark.parametrize("part", range(PARTS))
def test_a_row_trains_on_two_ranks_what_it_trains_on_one(part: int, folder: Path, rank_pools: RankPools) -> None:
    bad = [(shown(row), found) for row in rows()[part::PARTS] if (found := list(differences(row, folder, rank_pools)))]
    assert not bad, "\n\n".join(f"{row}: {len(found)} differ: " + "\n".join(found[:4]) for row, found in bad)


EFFECTS = list(dict.fromkeys(factor for factor in VALUES if factor not in SAME))


@pytest.mark.wide
@pytest.mark.parametrize("factor", EFFECTS[:-1])
def test_each_of_a_pair_changes_what_is_trained(factor: str, folder: Path, rank_pools: RankPools) -> None:
    @cache
    def trained(row: frozenset[One]) -> Tensors:
        return tensors(rank_pools(1).run(train, flags(dict(row), folder), 1))

    idle = []
    for one, other in PAIRS:
        row = with_needs(dict([one, other]))
        of_effects = one[0] == factor and other[0] in EFFECTS and not {one[0], other[0]} <= {*KNOWN}
        if not of_effects or refusal(row) is not None:
            continue
        both = trained(frozenset(row.items()))
        for each in (one, other):
            without = {name: value for name, value in row.items() if name != each[0]}
            if NEEDS.get(one, {}).keys() | NEEDS.get(other, {}).keys() <= without.keys():
                plain = trained(frozenset(without.items()))
                if plain.keys() == both.keys() and all(plain[name].equal(both[name]) for name in both):
                    idle.append(f"{shown(row)}: {each[1]} changes nothing")
    assert not idle, "\n".join(idle)

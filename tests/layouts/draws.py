"""Networks, layouts and precisions for each program, drawn from a seed and a number."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from megalite.config import parse_arguments, resolve
from megalite.conversion.families import FAMILIES
from megalite.conversion.family import choose
from megalite.errors import CheckpointError, ConfigurationError
from megalite.extras.verify.command import read_command
from museum.plain.command_line import command_line
from museum.plain.settings import Settings

Flags = dict[str, Any]
"""Values of flags by their names, without dashes. True: a switch."""
HEADS = 4
VOCABULARY = 63
"""Tokens, without the one that a NullTokenizer adds."""


_MOST_TRIES = 1000


@dataclass(frozen=True)
class Draw:
    """One step of a program on a drawn layout.

    Attributes:
        seed, number: what it was drawn from.
        flags: those of the program, or of the script that stands for it.
        how: what is recorded: whole tensors, sketches, or the program's own files (logs).
        masked: whether about two in five labels count in no loss.
    """

    program: str
    seed: str
    number: int
    ranks: int
    flags: Flags
    how: str = "whole"
    masked: bool = False

    @property
    def name(self) -> str:
        return f"{self.program}-{self.seed}-{self.number}"

    @property
    def text(self) -> str:
        """The flags as words."""
        return words(self.flags)

    @property
    def weights_seed(self) -> int:
        """Seed of weights and samples."""
        return Random(self.name).randrange(2**31)

    @property
    def command(self) -> str:
        """The command that runs it again."""
        return f"python -m tests.layouts --seed {self.seed} --draw {self.number} --program {self.program}"


def words(flags: Flags) -> str:
    """Return flags as they stand in a command."""
    return " ".join(
        f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}" for name, value in flags.items()
    )


def draw(program: str, seed: str, number: int) -> Draw:
    """Return the draw of a number, which the program accepts. Raises RuntimeError if it accepts none."""
    random = Random(f"{program} {seed} {number}")
    for _ in range(_MOST_TRIES):
        ranks, flags, how, masked = _DRAWN[program](random)
        if is_valid(program, flags, ranks):
            return Draw(program, seed, number, ranks, flags, how, masked)
    raise RuntimeError(f"of {_MOST_TRIES} draws {program} accepts none")


def is_valid(program: str, flags: Flags, ranks: int) -> bool:
    """Tell whether a program has such networks and layouts, as far as its rules are here."""
    try:
        if program == "plain":
            settings = Settings(**flags)
            return read_command(command_line(settings)).world_size == ranks
        if program != "torchtitan":
            config = resolve(parse_arguments(shlex.split(words(flags))).config, ranks)
            if program == "transformers":
                choose(FAMILIES, config.model)
    except (ConfigurationError, CheckpointError, ValueError):
        return False
    return True


# ------------------------------------------------------------------------------------------------ layouts


@dataclass(frozen=True)
class Axes:
    """Numbers of ranks on each axis."""

    tp: int
    cp: int
    dp: int
    pp: int

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp


def _axes(random: Random) -> Axes:
    """Return a layout on 1, 2 or 4 ranks, each one alike."""
    ranks = random.choice([1, 2, 2, 4, 4, 4])
    every = (1, 2, 4)
    found = [Axes(tp, cp, dp, pp) for tp in every for cp in every for dp in every for pp in every]
    return random.choice([axes for axes in found if axes.world == ranks])


def _layout(random: Random, axes: Axes, flags: Flags) -> Flags:
    """Return the flags of a layout for a network, with its batches."""
    found: Flags = {}
    sizes = {"tensor-model": axes.tp, "context": axes.cp, "pipeline-model": axes.pp}
    found |= {f"{name}-parallel-size": size for name, size in sizes.items() if size > 1}
    experts = "num-experts" in flags
    if axes.tp > 1 and (experts or random.random() < 0.5):
        found["sequence-parallel"] = True
    if experts:
        split = random.choice([1, axes.tp])
        if axes.tp > 1:
            found["expert-tensor-parallel-size"] = split
        if (size := random.choice([1, 2, 4])) > 1:
            found["expert-model-parallel-size"] = size
    rounds = 1
    if axes.pp > 1 and flags["num-layers"] % (2 * axes.pp) == 0 and random.random() < 0.5:
        found["num-layers-per-virtual-pipeline-stage"] = flags["num-layers"] // (2 * axes.pp)
        rounds = axes.pp
    if random.random() < 0.4:
        found["use-distributed-optimizer"] = True
    size = random.choice([1, 2])
    return found | {
        "micro-batch-size": size,
        "global-batch-size": size * axes.dp * rounds * random.choice([1, 2, 3]),
    }


# ------------------------------------------------------------------------------------------------ networks


def _network(random: Random, has: frozenset[str], tp: int) -> Flags:
    """Return the flags of a network.

    Args:
        has: features that the program has.
        tp: tensor-parallel ranks, over which groups of heads are divided.
    """

    def sometimes(share: float, feature: str = "") -> bool:
        return (not feature or feature in has) and random.random() < share

    flags: Flags = {
        "num-layers": random.choice([2, 2, 4]),
        "hidden-size": random.choice([32, 48, 64]),
        "num-attention-heads": HEADS,
        "seq-length": (length := random.choice([16, 32])),
        "max-position-embeddings": length,
        "normalization": random.choice(["RMSNorm", "RMSNorm", "LayerNorm"]),
    }
    flags |= _positions(random, has)
    activation = random.choice(["", "swiglu", "swiglu", "squared-relu"])
    if activation:
        flags[activation] = True
    if sometimes(0.3):
        flags["ffn-hidden-size"] = random.choice([40, 96])
    if sometimes(0.5):
        flags["untie-embeddings-and-output-weights"] = True
    experts = sometimes(0.3, "experts")
    if experts or sometimes(0.6):
        flags["disable-bias-linear"] = True
    if sometimes(0.15, "latents") and flags["position-embedding-type"] == "rope":
        flags |= _latents(random)
        flags.pop("use-rope-scaling", None)  # which Megatron-LM leaves out here
    else:
        if sometimes(0.5):
            groups = [count for count in (1, 2) if count % tp == 0 or (tp % count == 0 and "shared heads" in has)]
            if groups:
                flags |= {"group-query-attention": True, "num-query-groups": random.choice(groups)}
        if sometimes(0.2):
            flags["kv-channels"] = random.choice([8, 12])
        if sometimes(0.3):
            flags["qk-layernorm"] = True
        if sometimes(0.25):
            flags["add-qkv-bias"] = True
        if sometimes(0.15, "output gate"):
            flags["attention-output-gate"] = True
        if sometimes(0.15, "sinks"):
            flags["softmax-type"] = "learnable"
        if sometimes(0.15, "windows"):
            flags["window-size"] = "5,0"
    if experts:
        flags |= _experts(random, flags["num-layers"])
    return flags


def _with_pattern(random: Random, flags: Flags) -> Flags:
    """Return the flags of a network with recurrent layers, if theirs leave room for it, and otherwise the same."""
    if random.random() < 0.75 or flags.keys() & {"num-experts", "multi-latent-attention", "mtp-num-layers"}:
        return flags
    mixers = [random.choice("MG*") for _ in range(flags["num-layers"] // 2)]
    pattern = "".join(f"{mixer}-" for mixer in mixers)
    sizes: Flags = {"mamba-state-dim": 8, "mamba-head-dim": 4} if "M" in pattern else {}
    if "G" in pattern:
        sizes |= {f"linear-num-{heads}-heads": 4 for heads in ("key", "value")}
        sizes |= {f"linear-{heads}-head-dim": 8 for heads in ("key", "value")}
    return flags | {"hybrid-layer-pattern": pattern} | sizes


def _positions(random: Random, has: frozenset[str]) -> Flags:
    kind = random.choice(["learned_absolute", "rope", "rope", "rope"])
    flags: Flags = {"position-embedding-type": kind}
    if kind == "rope":
        more: list[Flags] = [{}, {"rotary-percent": 0.5}, {"rotary-base": 20000}]
        if "long contexts" in has:
            more.append({"use-rope-scaling": True})
        flags |= random.choice(more)
    return flags


def _latents(random: Random) -> Flags:
    flags: Flags = {"multi-latent-attention": True, "rope-type": "rope", "kv-lora-rank": 12, "qk-head-dim": 6}
    flags |= {"qk-pos-emb-head-dim": 4, "v-head-dim": 8}
    if random.random() < 0.5:
        flags |= {"q-lora-rank": 12, "qk-layernorm": True}
    return flags


def _experts(random: Random, layers: int) -> Flags:
    """Return flags of experts, all of which the same tokens reach on any layout."""
    flags: Flags = {"num-experts": 4, "moe-router-topk": random.choice([1, 2]), "moe-token-dispatcher-type": "alltoall"}
    if flags["moe-router-topk"] == 1 or random.random() < 0.3:
        flags["moe-router-pre-softmax"] = True
    balance = random.choice(["none", "aux_loss", "seq_aux_loss"])
    flags["moe-router-load-balancing-type"] = balance
    if balance != "none":
        flags["moe-aux-loss-coeff"] = 0.1
    elif random.random() < 0.5:
        flags.pop("moe-router-pre-softmax", None)
        flags |= {"moe-router-score-function": "sigmoid", "moe-router-enable-expert-bias": True}
        flags["moe-router-topk-scaling-factor"] = 2.5
    if random.random() < 0.3:
        flags["moe-z-loss-coeff"] = 0.1
    if random.random() < 0.5:
        flags["moe-ffn-hidden-size"] = 16
    if random.random() < 0.4:
        flags["moe-shared-expert-intermediate-size"] = 24
    if random.random() < 0.3:
        flags["moe-layer-freq"] = "[0" + ",1" * (layers - 1) + "]"
    return flags


# ------------------------------------------------------------------------------------------------ programs

_Drawn = tuple[int, Flags, str, bool]
"""Ranks, flags, what is recorded, and whether labels are masked."""


def _data() -> Flags:
    return {
        "mock-data": True,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": VOCABULARY,
        "make-vocab-size-divisible-by": 8,
    }


def _megatron(random: Random) -> _Drawn:
    axes = _axes(random)
    has = {"experts", "latents", "long contexts", "output gate", "sinks"}
    if axes.cp > 1:
        has -= {"sinks"}  # which the stand-in for Transformer Engine's attention lacks
    flags = _network(random, frozenset(has), axes.tp)
    flags |= _data() | _layout(random, axes, flags)
    if "squared-relu" in flags:
        flags["disable-bias-linear"] = True  # with biases it asks for a fused one, which it does not have
    if flags.get("expert-tensor-parallel-size", 1) > 1:
        flags.pop("expert-model-parallel-size", None)  # gloo has no all-gather of uneven parts
    if random.random() < 0.5:
        flags["bf16"] = True
    if random.random() < 0.3:
        flags["calculate-per-token-loss"] = True
    flags |= {"train-iters": 4, "lr": 1e-3, "hidden-dropout": 0, "attention-dropout": 0}
    return axes.world, flags, random.choice(["logs", "whole", "sketches"]), random.random() < 0.5


_OWN = frozenset({"experts", "latents", "long contexts", "output gate", "sinks", "windows", "shared heads"})


def _megalite(random: Random) -> _Drawn:
    axes = _axes(random)
    flags = _network(random, _OWN, axes.tp)
    flags |= _data() | _layout(random, axes, flags) | _of_megalite(random, axes, flags)
    flags |= {"train-iters": 9, "eval-iters": 0, "lr": 0.05, "lr-decay-style": "constant", "init-method-std": 0.1}
    flags = _with_pattern(random, flags)
    return axes.world, flags, random.choice(["whole", "sketches"]), False


def _of_megalite(random: Random, axes: Axes, flags: Flags) -> Flags:
    """Return flags that megalite has beside those of a network and its layout, or that change no number elsewhere."""
    found: Flags = {}
    dropout = random.choice([0, 0.1])
    found |= {"hidden-dropout": dropout, "attention-dropout": dropout}
    if (precision := random.choice(["bf16", "bf16", "", "", "fp16", "fp64"])) != "":
        found[precision] = True
    if precision == "fp16":
        found["initial-loss-scale"] = 1024
    if axes.dp * axes.cp > 1 and random.random() < 0.5:
        strategy = random.choice(["optim", "optim_grads", "optim_grads_params"])
        found |= {"use-distributed-optimizer": True, "data-parallel-sharding-strategy": strategy}
    if random.random() < 0.3:
        found["overlap-grad-reduce"] = True
    if axes.pp > 1 and "num-layers-per-virtual-pipeline-stage" not in flags:
        found["pipeline-schedule"] = random.choice(["1f1b", "gpipe", "zb-h1", "zb-v"])
    if axes.cp > 1:
        found["cp-comm-type"] = random.choice(["p2p", "all_gather", "a2a"])
    more: list[Flags] = [
        {},
        {},
        {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1},
        {"reset-position-ids": True, "reset-attention-mask": True, "eod-mask-loss": True},
        {"mtp-num-layers": random.choice([1, 2])},
        {"attn-logit-softcapping": 5.0, "final-logit-softcapping": 8.0},
        {"sandwich-norm": True},
    ]
    return found | random.choice(more)


_RMS: Flags = {"normalization": "RMSNorm", "swiglu": True, "disable-bias-linear": True}
_EXPERTS: Flags = {"num-experts": 4, "moe-router-topk": 2, "moe-router-load-balancing-type": "none"}
_FAMILIES: Mapping[str, Flags] = {
    "gpt2": {"position-embedding-type": "learned_absolute"},
    "llama": _RMS,
    "mistral": _RMS | {"window-size": "5,0"},
    "qwen2": _RMS | {"add-qkv-bias": True},
    "qwen3": _RMS | {"qk-layernorm": True},
    "mixtral": _RMS | _EXPERTS,
    "qwen3_moe": _RMS | _EXPERTS | {"qk-layernorm": True, "moe-ffn-hidden-size": 16},
    "qwen2_moe": _RMS
    | _EXPERTS
    | {
        "add-qkv-bias": True,
        "moe-ffn-hidden-size": 16,
        "moe-shared-expert-intermediate-size": 24,
        "moe-shared-expert-gate": True,
        "moe-router-pre-softmax": True,
    },
    "gpt_neox": {"use-parallel-residual": True, "exact-gelu": True, "rotary-percent": 0.5},
    "deepseek_v3": _RMS
    | _EXPERTS
    | {
        "multi-latent-attention": True,
        "rope-type": "rope",
        "q-lora-rank": 12,
        "kv-lora-rank": 10,
        "qk-head-dim": 6,
        "qk-pos-emb-head-dim": 4,
        "v-head-dim": 8,
        "qk-layernorm": True,
        "moe-ffn-hidden-size": 16,
        "moe-shared-expert-intermediate-size": 16,
        "latent-norm-epsilon": 1e-6,
        "moe-layer-freq": "[0,1]",
        "moe-router-score-function": "sigmoid",
        "moe-router-enable-expert-bias": True,
        "moe-router-topk-scaling-factor": 2.5,
    },
}
"""Families of Hugging Face, and the flags of their networks."""


def _transformers(random: Random) -> _Drawn:
    family = random.choice([*_FAMILIES])
    own = {"position-embedding-type": "rope"} | _FAMILIES[family]
    length, size = random.choice([16, 32]), random.choice([1, 2])
    flags: Flags = {
        "num-layers": 2,
        "hidden-size": random.choice([32, 48, 64]),
        "num-attention-heads": HEADS,
        "ffn-hidden-size": random.choice([64, 96]),
        "seq-length": length,
        "max-position-embeddings": length,
        "micro-batch-size": size,
        "global-batch-size": size * random.choice([1, 2, 3]),
        "train-iters": 1,
        "lr": 1e-3,
        "hidden-dropout": 0,
        "attention-dropout": 0,
    }
    flags |= _data() | {"make-vocab-size-divisible-by": 1} | own
    if family not in ("gpt2", "gpt_neox", "deepseek_v3"):
        flags |= {"group-query-attention": True, "num-query-groups": random.choice([1, 2, 4])}
    if own["position-embedding-type"] == "rope" and random.random() < 0.3:
        flags["rotary-base"] = 20000
    if family == "llama" and random.random() < 0.3:
        flags["use-rope-scaling"] = True
    if family != "gpt2" and random.random() < 0.7:
        flags["untie-embeddings-and-output-weights"] = True
    if random.random() < 0.5:
        flags["bf16"] = True
    return 1, flags, random.choice(["whole", "sketches"]), random.random() < 0.3


def _plain(random: Random) -> _Drawn:
    axes = _axes(random)
    experts = random.random() < 0.3
    size = random.choice([1, 2])
    flags: Flags = {
        "layers": axes.pp * random.choice([1, 2]) if axes.pp > 1 else random.choice([2, 3]),
        "hidden": random.choice([32, 48, 64]),
        "ffn": random.choice([64, 96]),
        "key_value_heads": random.choice([1, 2, 4]),
        "tied": random.random() < 0.4,
        "qk_norm": not experts and random.random() < 0.4,
        "tp": axes.tp,
        "cp": axes.cp,
        "dp": axes.dp,
        "pp": axes.pp,
        "sp": axes.tp > 1 and (experts or random.random() < 0.5),
        "schedule": random.choice(["1f1b", "gpipe"]),
        "zero": random.random() < 0.4,
        "average": random.random() < 0.5,
        "sequence": random.choice([16, 32]),
        "micro_batch": size,
        "batch": size * axes.dp * random.choice([1, 2, 3]),
        "masked": random.choice([0.0, 0.3]),
        "documents": random.random() < 0.4,
        "dtype": random.choice(["fp32", "bf16"]),
        "steps": 1,
        "seed": random.randrange(1, 10_000),
    }
    if experts:
        flags |= {"experts": 4, "top_k": random.choice([2, 3]), "auxiliary": random.choice([0.0, 0.05])}
        flags["ep"] = random.choice([size for size in (1, 2, 4) if axes.dp * axes.cp % size == 0])
    how = random.choice(["whole", "sketches"])
    return axes.world, flags | {"whole": how == "whole"}, how, False


def _torchtitan(random: Random) -> _Drawn:
    tp, dp = random.choice([(1, 1), (2, 1), (2, 1), (1, 2), (2, 2)])
    flags: Flags = {
        "model": random.choice(["llama3", "qwen3"]),
        "layers": random.choice([1, 2, 3]),
        "groups": random.choice([2, 4]),
        "fused": True,
        "length": random.choice([16, 32, 64]),
        "tp": tp,
        "dp": dp,
        "samples": dp * random.choice([1, 2]),
        "micro-batches": random.choice([1, 2]),
        "no-sp": tp > 1 and random.random() < 0.5,
        "backend": random.choice(["partial_dtensor", "full_dtensor"]),
        "dtype": random.choice(["float32", "bfloat16"]),
    }
    return tp * dp, flags, random.choice(["whole", "sketches"]), False


_DRAWN: Mapping[str, Callable[[Random], _Drawn]] = {
    "megatron": _megatron,
    "plain": _plain,
    "megalite": _megalite,
    "transformers": _transformers,
    "torchtitan": _torchtitan,
}
PROGRAMS = tuple(_DRAWN)


def draws(program: str, seed: str, count: int) -> Iterator[Draw]:
    """Yield the first draws of a program."""
    return (draw(program, seed, number) for number in range(count))

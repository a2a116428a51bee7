"""Translation of torchtitan's job configurations (TOML), and of its commands, into flags."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megalite.config.command_line import flag_groups
from megalite.config.yaml_file import nearest
from megalite.errors import ConfigurationError
from megalite.extras.translation.keys import (
    add_number,
    add_others,
    as_count,
    as_number,
    by_key,
    is_on,
    leaves,
    tables,
    whole_number,
)
from megalite.extras.translation.report import Report
from megalite.small_files import WHOLE_NUMBERS, parse_toml, read_small_file, reason, shown

LARGEST = 2**18
"""Largest size of a job configuration, in bytes."""
_DEEPEST, _MOST_KEYS = 8, 1000
_FLAVORS = {  # layers, hidden, feed-forward, heads, groups of heads, vocabulary
    "debugmodel": (6, 256, 768, 16, 16, 2048),
    "8B": (32, 4096, 14336, 32, 8, 128256),
    "70B": (80, 8192, 28672, 64, 8, 128256),
    "405B": (126, 16384, 53248, 128, 8, 128256),
}
_LLAMA3 = [
    *(
        "--position-embedding-type",
        "rope",
        "--rotary-base",
        "500000",
        "--use-rope-scaling",
        "--normalization",
        "RMSNorm",
    ),
    *("--norm-epsilon", "1e-5", "--swiglu", "--no-add-bias-linear", "--untie-embeddings-and-output-weights"),
    *("--hidden-dropout", "0", "--attention-dropout", "0"),
]
_SIZES = ("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups", "vocab-size")
_DEFAULTS: dict[str, Any] = {
    "training.seq_len": 2048,
    "training.steps": 10000,
    "training.max_norm": 1.0,
    "optimizer.lr": 8e-4,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.95,
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.1,
    "lr_scheduler.warmup_steps": 200,
}
"""Defaults of torchtitan for the keys with flags of their own."""
_OLDER = {
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
}
"""Keys of earlier releases by what they are now."""
_SCHEDULES = {"1f1b": ("1f1b", 1), "gpipe": ("gpipe", 1), "interleaved1f1b": ("interleaved-1f1b", 2)}
_SCHEDULES["zbvzerobubble"] = ("zb-v", 2)
_DECAYS = {"linear": "linear", "cosine": "cosine", "sqrt": "minus_sqrt"}


def read_job(path: str) -> dict[str, Any]:
    """Read a job configuration.

    Raises:
        ConfigurationError: the file is missing, is not regular, is too large, or is not TOML.
    """
    try:
        return parse_job(read_small_file(Path(path), largest=LARGEST).decode())
    except (ConfigurationError, OSError, ValueError) as error:
        raise ConfigurationError(f"job.config_file {shown(path)}: {reason(error)}") from error


def parse_job(text: str) -> dict[str, Any]:
    """Parse a job configuration. Raises ConfigurationError if it is not TOML, or is nested too deeply."""
    try:
        settings = parse_toml(text)
    except ValueError as error:
        raise ConfigurationError(f"not TOML: {reason(error)}") from error
    level: list[Any] = [settings]
    for _ in range(_DEEPEST):
        level = [inner for each in level if isinstance(each, dict) for inner in each.values()]
        if len(level) > _MOST_KEYS or any(isinstance(each, int) and each not in WHOLE_NUMBERS for each in level):
            raise ConfigurationError(f"not a job configuration: over {_MOST_KEYS} keys, or numbers of over 64 bits")
    if level:
        raise ConfigurationError(f"not a job configuration: nested deeper than {_DEEPEST - 1} levels")
    return settings


def translate_command(
    program: str, argv: Sequence[str], environment: Mapping[str, str], report: Report, ranks: int | None
) -> None:
    """Add the flags of a command of torchtitan, whose settings stand above those of its job configuration.

    Args:
        environment: variables of the command: CONFIG_FILE and NGPU count for run_train.sh.

    Raises:
        ConfigurationError: the command has no job configuration, or one that cannot be read or translated.
    """
    by_script = program.endswith("run_train.sh")
    report.whole = False
    if by_script and report.per_node is None:
        report.per_node = as_count("NGPU", _value(environment.get("NGPU", "8")), least=1)
    given = dict(_overrides(argv, report))
    file = given.pop("job.config_file", environment.get("CONFIG_FILE") if by_script else None)
    if file is None and report.missing:
        raise ConfigurationError(report.missing[0])
    if file is None or "config" in given or "module" in given:
        how = "CONFIG_FILE=FILE.toml" if by_script else "--job.config_file FILE.toml"
        raise ConfigurationError(f"torchtitan's settings are in no TOML file: write them into one, and give {how}")
    settings = read_job(str(file))
    for key, value in given.items():
        section, _, name = key.partition(".")
        values = settings.setdefault(section, {})
        if not name or not isinstance(values, dict):
            raise ConfigurationError(f"--{key[:100]}: expected --section.key value")
        values[name] = value
    translate(settings, report, report.world_size or ranks)


def _overrides(argv: Sequence[str], report: Report) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of the flags of a command, except those whose values only a shell can tell."""
    for flag, words in flag_groups(argv):
        if any(f"--{flag} needs " in line.replace("_", "-") for line in report.missing):
            continue
        section, dot, name = flag.replace("-", "_").partition(".")
        off = not words and name.startswith("no_")
        values = [_value(word) for word in words]
        key = f"{section}{dot}{name.removeprefix('no_') if off else name}"
        yield key, not off if not values else values[0] if len(values) == 1 else values


def _value(word: str) -> Any:
    """Return a word of a command as TOML would have it."""
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        try:
            return kind(word[:100])
        except ValueError:
            continue
    return word


def translate(settings: Mapping[str, Any], report: Report, ranks: int | None) -> None:
    """Add the flags that a job configuration stands for.

    Args:
        ranks: number of all ranks, if it is known.

    Raises:
        ConfigurationError: a section or the model is unknown, or the degrees of parallelism do not fit the ranks.
    """
    names, idle, refused = tables(), by_key("torchtitan_idle"), by_key("torchtitan_refused")
    known = {*names["torchtitan_flags"], *names["torchtitan_read"]["keys"].split(), *idle, *refused}
    sections = {key.partition(".")[0] for key in known}
    for name, section in settings.items():
        if name not in sections or not isinstance(section, Mapping):
            near = nearest(name[:100], sections)
            raise ConfigurationError(f"{shown(name)} is no section of a job configuration of torchtitan{near}")
    found = leaves(settings, {*idle, *refused})
    for old, new in _OLDER.items():
        if old in found:
            found[new] = found.pop(old)
    if not found:
        raise ConfigurationError("not a job configuration of torchtitan: expected sections such as [training]")
    values = {key: value for key, value in (_DEFAULTS | found).items() if value is not None}
    layers = _model(values, report)
    degrees = {name: _degree(values, f"{name}_parallel_degree") for name in ("tensor", "pipeline", "context")}
    degrees["replicate"] = _degree(values, "data_parallel_replicate_degree")
    shards = _shards(values, degrees, ranks)
    copies = None if shards is None else degrees["replicate"] * shards
    flags = [(key, flag) for key, flag in names["torchtitan_flags"].items() if key in values]
    steps: list[Callable[[], None]] = [
        partial(add_number, values, report, key, flag, note="" if key in found else ", torchtitan's default")
        for key, flag in flags
    ]
    steps += [partial(_batch, values, report, degrees["pipeline"], copies)]
    steps += [partial(_layout, values, report, degrees, shards), partial(_pipeline, values, report, degrees, layers)]
    steps += [partial(step, values, report) for step in (_precision, _optimizer, _schedule, _others)]
    steps += [lambda: add_others(values, report, known, idle, refused)]
    for step in steps:  # a bad value does not hide what the others say
        try:
            step()
        except ConfigurationError as error:
            report.refused += [line for line in str(error).splitlines() if line not in report.refused]
    report.note_decay("torchtitan")
    report.notes.append(
        "the data, the tokenizer and --save are not torchtitan's: give --data-path, --tokenizer-type, ..."
    )


def _model(values: Mapping[str, Any], report: Report) -> int:
    """Add the flags of the model, and return its number of layers."""
    name, flavor = values.get("model.name", "llama3"), str(values.get("model.flavor", "debugmodel"))
    if name != "llama3" or flavor not in _FLAVORS:
        of = f"model.name {shown(name)}, model.flavor {shown(flavor)}"
        raise ConfigurationError(f"{of}: llama3 is known, as {', '.join(_FLAVORS)}; give the network as flags instead")
    sizes = [word for size, number in zip(_SIZES, _FLAVORS[flavor], strict=True) for word in (f"--{size}", str(number))]
    length = str(as_count("training.seq_len", values["training.seq_len"], least=1))
    exact = ("--group-query-attention", "--make-vocab-size-divisible-by", "1", "--max-position-embeddings", length)
    report.add(f"model llama3 {flavor}", *sizes, *exact, *_LLAMA3)
    return _FLAVORS[flavor][0]


def _degree(values: Mapping[str, Any], name: str) -> int:
    return whole_number(values, f"parallelism.{name}") or 1


def _shards(values: Mapping[str, Any], degrees: Mapping[str, int], ranks: int | None) -> int | None:
    """Return the number of ranks that shard weights among them; None if it is that of all that are left."""
    key, others = "data_parallel_shard_degree", 1
    for degree in degrees.values():
        others *= degree
    left = values.get(f"parallelism.{key}", -1) == -1
    if left and ranks is None:
        return None
    shards = (ranks or 0) // others if left else _degree(values, key)
    if ranks is not None and others * shards != ranks:
        product = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
        raise ConfigurationError(f"{key}: {ranks} ranks are not {product} x {'any number' if left else shards}")
    return shards


def _batch(values: Mapping[str, Any], report: Report, stages: int, copies: int | None) -> None:
    local = whole_number(values, "training.local_batch_size") or 8
    micro = (whole_number(values, "parallelism.pipeline_parallel_microbatch_size") or 1) if stages > 1 else local
    source = "pipeline_parallel_microbatch_size" if stages > 1 else "training.local_batch_size"
    if local % micro:
        raise ConfigurationError(f"training.local_batch_size {local} is not a multiple of {source} {micro}")
    report.add(source, "--micro-batch-size", str(micro))
    total = None if values.get("training.global_batch_size", -1) == -1 else values["training.global_batch_size"]
    if total is None and copies is None:
        report.missing.append(f"--global-batch-size: {local} x data-parallel ranks; give --ranks, or --gpus of a plan")
        return
    number = local * (copies or 1) if total is None else as_count("training.global_batch_size", total, least=1)
    if copies and number % (local * copies):
        raise ConfigurationError(
            f"training.global_batch_size {number} is not a multiple of local_batch_size {local} x {copies} "
            "data-parallel ranks: change one of the three"
        )
    of = "training.global_batch_size" if total is not None else f"local_batch_size {local} x {copies} ranks"
    report.add(of, "--global-batch-size", str(number))


def _layout(values: Mapping[str, Any], report: Report, degrees: Mapping[str, int], shards: int | None) -> None:
    """Add the flags of data, tensor and context parallelism."""
    policy = str(values.get("parallelism.fsdp_reshard_after_forward", "default"))
    if policy not in ("default", "always", "never"):
        raise ConfigurationError(f"fsdp_reshard_after_forward {shown(policy)}: expected default, always or never")
    reshards = policy == "always" or (policy == "default" and degrees["pipeline"] == 1)
    if shards is None or shards * degrees["context"] > 1:
        strategy = "optim_grads_params" if reshards else "optim_grads"
        report.add(f"fsdp_reshard_after_forward {policy}", "--data-parallel-sharding-strategy", strategy)
        report.add("FSDP", "--overlap-grad-reduce", *([] if reshards else ["--overlap-param-gather"]))
        if degrees["replicate"] > 1:
            number = str(degrees["replicate"])
            report.add("data_parallel_replicate_degree", "--num-distributed-optimizer-instances", number)
    elif degrees["replicate"] > 1:
        report.add("DDP", "--overlap-grad-reduce")
    if degrees["tensor"] > 1:
        split = ("--tensor-model-parallel-size", str(degrees["tensor"]), "--sequence-parallel")
        report.add("tensor_parallel_degree", *split)
    if degrees["context"] > 1:
        ways = {"allgather": "all_gather", "alltoall": "p2p"}
        if (way := str(values.get("parallelism.context_parallel_rotate_method", "allgather"))) not in ways:
            raise ConfigurationError(f"context_parallel_rotate_method {shown(way)}: expected {' or '.join(ways)}")
        around = ("--context-parallel-size", str(degrees["context"]), "--cp-comm-type", ways[way])
        report.add(f"context_parallel_degree, {way}", *around)


def _pipeline(values: Mapping[str, Any], report: Report, degrees: Mapping[str, int], layers: int) -> None:
    """Add the flags of the pipeline and of recomputation, which counts the layers of a stage."""
    ranks, stages = degrees["pipeline"], 1
    if ranks > 1:
        name = str(values.get("parallelism.pipeline_parallel_schedule", "1F1B"))
        if name.lower() not in _SCHEDULES:
            use = "1F1B, GPipe, Interleaved1F1B and ZBVZeroBubble are translated"
            raise ConfigurationError(f"pipeline_parallel_schedule {shown(name)}: {use}")
        schedule, chunks = _SCHEDULES[name.lower()]
        less = [
            as_count(key, values.get(f"parallelism.{key}", 1), most=layers)
            for key in (f"pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
        ]
        each = whole_number(values, "parallelism.pipeline_parallel_layers_per_stage")
        stages = -(-(layers + sum(less)) // each) if each else ranks * chunks
        report.add("pipeline_parallel_degree", "--pipeline-model-parallel-size", str(ranks))
        report.add(f"pipeline_parallel_schedule {name}", "--pipeline-schedule", schedule)
        letters = _letters(layers, stages, *less)
        report.add("layers of the stages", "--pipeline-model-parallel-layout", letters)
        local = whole_number(values, "training.local_batch_size") or 8
        report.notes.append(f"torchtitan drains the pipeline after each local batch of {local}; here once a step")
    mode = str(values.get("activation_checkpoint.mode", "selective"))
    option = str(values.get("activation_checkpoint.selective_ac_option", "2"))
    whole = ("--recompute-granularity", "full", "--recompute-method")
    if mode == "full" or (mode, option) == ("selective", "1"):
        report.add(f"activation_checkpoint.mode {mode}", *whole, "uniform", "--recompute-num-layers", "1")
    elif mode == "selective" and option.isdecimal() and int(option[:9]) > 0:
        count = max(layers // stages // int(option[:9]), 1)
        source = f"activation_checkpoint: 1 layer in {option}, here the first of a stage"
        report.add(source, *whole, "block", "--recompute-num-layers", str(count))
    elif mode != "none":
        what = f"selective, {shown(option)}" if mode == "selective" else shown(mode)
        use = "operations are not chosen one by one; give --recompute-granularity selective or full"
        report.refused.append(f"activation_checkpoint {what}: {use}")


def _letters(layers: int, stages: int, first: int, last: int) -> str:
    """Return the contents of the stages as letters: the embedding and the head count as some layers."""
    each, more = divmod(layers + first + last, stages)
    counts = [each + (stage < more) for stage in range(min(stages, layers + 1))]
    counts[0] -= first
    counts[-1] -= last
    if stages > layers or min(counts) < 0:
        raise ConfigurationError(f"pipeline_parallel_degree: {layers} layers do not divide among {stages} stages")
    return f"E{'|'.join(f't*{count}' if count else '' for count in counts)}L"


def _precision(values: Mapping[str, Any], report: Report) -> None:
    expected: dict[str, dict[str, list[str]]] = {
        "training.mixed_precision_param": {"bfloat16": ["--bf16"], "float32": []},
        "training.mixed_precision_reduce": {"float32": [], "bfloat16": ["--grad-reduce-in-bf16"]},
        "training.dtype": {"float32": []},
    }
    for key, flags in expected.items():
        value = str(values.get(key, next(iter(flags))))
        if value not in flags:
            report.refused.append(f"{key} {shown(value)}: expected {' or '.join(flags)}")
        elif flags[value]:
            report.add(f"{key} {value}", *flags[value])


def _optimizer(values: Mapping[str, Any], report: Report) -> None:
    if (name := values.get("optimizer.name", "AdamW")) != "AdamW":
        report.refused.append(f"optimizer.name {shown(name)}: only AdamW is translated; see --optimizer")
        return
    report.add("optimizer.name AdamW", "--optimizer", "adam")


def _schedule(values: Mapping[str, Any], report: Report) -> None:
    """Add the flags of the learning rate after the warm-up."""
    steps = whole_number(values, "lr_scheduler.total_steps") or whole_number(values, "training.steps") or 1
    if "lr_scheduler.total_steps" in values:
        report.add("lr_scheduler.total_steps", "--lr-decay-iters", str(steps))
    kind, ratio = str(values.get("lr_scheduler.decay_type", "linear")), values.get("lr_scheduler.decay_ratio")
    if kind not in _DECAYS:
        raise ConfigurationError(f"lr_scheduler.decay_type {shown(kind)}: expected {', '.join(_DECAYS)}")
    rest = max(steps - as_count("lr_scheduler.warmup_steps", values["lr_scheduler.warmup_steps"]), 0)
    last = rest
    if ratio is not None:
        last = min(round(steps * float(as_number("decay_ratio", ratio, lambda share: 0 <= share <= 1))), rest)
    if last == 0:
        report.add("no decay", "--lr-decay-style", "constant")
        return
    if ratio is None and kind != "sqrt":
        report.add(f"lr_scheduler.decay_type {kind}", "--lr-decay-style", kind)
    else:
        decay = ("--lr-wsd-decay-style", _DECAYS[kind], "--lr-wsd-decay-iters", str(last))
        report.add(f"{kind} decay in the last {last} of {steps} steps", "--lr-decay-style", "WSD", *decay)
    if factor := values.get("lr_scheduler.min_lr_factor"):
        rate = float(as_number("optimizer.lr", values["optimizer.lr"])) * float(as_number("min_lr_factor", factor))
        report.add("lr_scheduler.min_lr_factor x optimizer.lr", "--min-lr", f"{rate:.6g}")


def _others(values: Mapping[str, Any], report: Report) -> None:
    """Add what is on or off: compilation, checkpoints, metrics, and the settings for one's debugging."""
    if is_on(values, "compile.enable"):
        report.add("compile.enable", "--compile")
    if is_on(values, "debug.deterministic"):
        report.add("debug.deterministic", "--deterministic-mode")
    folder = str(values.get("job.dump_folder", "outputs")).rstrip("/")
    folder = f"./{folder}" if folder.startswith("-") else folder  # no flag
    if is_on(values, "checkpoint.enable"):
        path = f"{folder}/{values.get('checkpoint.folder', 'checkpoint')}"
        every = str(whole_number(values, "checkpoint.interval") or 500)
        report.add("checkpoint.enable", "--save", path, "--save-interval", every)
        if str(values.get("checkpoint.async_mode", "disabled")) != "disabled":
            report.add("checkpoint.async_mode", "--async-save")
    if is_on(values, "metrics.enable_tensorboard"):
        path = f"{folder}/{values.get('metrics.save_tb_folder', 'tb')}"
        report.add("metrics.enable_tensorboard", "--tensorboard-dir", path)
    if "training.gc_freq" in values:
        every = str(whole_number(values, "training.gc_freq"))
        report.add("training.gc_freq", "--manual-gc", "--manual-gc-interval", every)

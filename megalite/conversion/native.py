"""Conversion from and to megalite's own checkpoints. Only weights are converted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from megalite.atomic_files import writing
from megalite.checkpoint import Contents, Plan, TrainingState, manifest
from megalite.checkpoint.compatibility import check_same_function, model_config, saved_section, with_rotary_of
from megalite.checkpoint.directory import resolve
from megalite.checkpoint.file_writer import cut_by_weights, cut_evenly, write_checkpoint
from megalite.checkpoint.fingerprint import BASE, fingerprint_of, has_places
from megalite.checkpoint.manifest import MASTER, MEAN, MODEL, STATE, is_optimizer_state
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.tensors import Source, widest
from megalite.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
)
from megalite.config.adapters import AdaptersConfig
from megalite.config.kinds.sparse_attention import without_indexers
from megalite.config.model import as_gpt
from megalite.config.pipeline_layout import stage_layers, virtual_stages
from megalite.config.prediction import without_depths
from megalite.config.tokenizer import TokenizerFlags
from megalite.config.validate_model import uneven_widths
from megalite.conversion import peft
from megalite.conversion.adapters import Adapters, Joined, check_finite
from megalite.conversion.huggingface import copy_companions, open_huggingface, tokenizer_folder
from megalite.conversion.opened import (
    OpenedModel,
    Renamed,
    kept_in_fp32,
    logical_tensors,
    states_of_training,
    tensors_of_training,
)
from megalite.errors import CheckpointError, ConfigurationError
from megalite.model.gpt import make_chunks
from megalite.optim.buckets import DataParallel
from megalite.parallel.adapter import train_a_part
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.sharding import Box
from megalite.pipeline.stages import Stages
from megalite.process.progress import Advance
from megalite.small_files import shown
from megalite.storage import AnyPath, open_directory

FILE = 5 * 10**9
"""Size in bytes of a file of weights, if no layout is given."""
_WITHOUT_ADAPTERS = AdaptersConfig()
_FLAGS: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {},
    torch.bfloat16: {"bf16": True},
    torch.float16: {"fp16": True},
    torch.float64: {"fp64": True},
}


def open_folder(
    path: AnyPath, dtype: torch.dtype | None = None, *, compare: bool = True, depths: bool = True
) -> OpenedModel:
    """Open a checkpoint, as `open_megalite`, a Hugging Face folder, as `open_huggingface`, or one of PEFT, with the
    base that it names. Raises CheckpointError.
    """
    if (path / peft.CONFIG).is_file() and not (path / "config.json").is_file():
        folder = Path(str(path))
        return peft.open_peft(folder, open_folder(peft.base_folder(folder), dtype, compare=compare))
    if (path / "config.json").is_file() and not (path / manifest.NAME).is_file():
        opened = open_huggingface(Path(str(path)), compare=compare, depths=depths)
    else:
        opened = open_megalite(path, dtype)
    return replace(opened, path=str(path.absolute() if isinstance(path, Path) else path))


def open_megalite(
    path: AnyPath, dtype: torch.dtype | None = None, *, mean: bool = False, base: str | None = None
) -> OpenedModel:
    """Open the checkpoint in a folder, or the latest checkpoint of a run directory. Adapters are merged.

    `dtype` is the dtype in which the weights are needed. If it is wider than the saved dtype, the weights are read from
    the optimizer's master weights, if these are saved. `mean`: take the mean of weights that the run has kept, rounded
    to `dtype` or to the saved one, in place of the weights; frozen weights are their own. `base`: where the base of
    adapters is now; None: where it was. Raises CheckpointError if no checkpoint, or no mean, can be read.
    """
    reader = CheckpointReader(resolve(open_directory(str(path))))
    config = reader.manifest.config
    model = as_gpt(model_config(reader.path, config))
    names = {name: name for name in reader.tensors if name.startswith(STATE)}
    if names:
        names = {name: name for name in names if name not in states_of_training(model)}
        if others := [name for name in names if name not in logical_tensors(model)]:
            raise CheckpointError(f"{reader.path} has {', '.join(others[:8])}: no other format can store such state")
    if not any(name.startswith(MODEL) for name in reader.tensors):
        raise CheckpointError(
            f"{reader.path} has no weights that all replicas share: resume it in a run without local updates, which "
            "averages them, and save it there"
        )
    for name in (each.removeprefix(MODEL) for each in reader.tensors if each.startswith(MODEL)):
        finer = dtype is not None and dtype.itemsize > reader.tensors[MODEL + name].dtype.itemsize
        names[name] = MASTER + name if finer and MASTER + name in reader.tensors else MODEL + name
    source: Source = Renamed(reader, names)
    if mean:
        if not any(name.startswith(MEAN) for name in reader.tensors):
            raise CheckpointError(f"--ema: {reader.path} has no mean of the weights: it was saved without --ema-decay")
        kinds = {name: kind for name, kind in source.tensors.items() if not name.startswith(STATE)}
        names |= {name: MEAN + name for name in kinds if MEAN + name in reader.tensors}
        precise = {names[name] for name in kept_in_fp32(model)}
        source = Renamed(reader, names, dtype or widest(kinds.values()), precise)
    data = saved_section(reader.path, config, DataConfig)
    tokenizer = {each.name: value for each in fields(TokenizerFlags) if (value := getattr(data, each.name))}
    adapters = saved_section(reader.path, config, AdaptersConfig)
    merged = None
    if adapters.lora_rank is not None:
        merged = _with_base(reader.path, config, adapters, model, source, base)
        source = merged.merged()
    elif base is not None:
        raise CheckpointError(f"--base {base}: {reader.path} has no adapters, and all of its weights: drop it")
    return OpenedModel(
        f"megalite, {reader.path}",
        model,
        source,
        tokenizer,
        data.seq_length,
        tokenizer_folder(tokenizer.get("tokenizer_model")),
        data.eos_token_ids,
        adapters=merged,
    )


def named_base(path: AnyPath, config: Mapping[str, Any]) -> str | None:
    """Return the folder of the base of the adapters in the checkpoint at `path`; None: it was drawn from the seed.

    Raises CheckpointError if it is no name of a folder.
    """
    named = config.get(BASE, {}).get("path")
    if named is None or (isinstance(named, str) and "\0" not in named):
        return named
    raise CheckpointError(f"{path} names the base of its adapters {shown(named)}, which is no folder")


def open_base(path: AnyPath, places: Sequence[str | None], flag: str) -> OpenedModel:
    """Open the base of the adapters in the checkpoint at `path`: in the first of these places that has a model.

    `flag`: the one that names another place. Raises CheckpointError if it is in none.
    """
    problems = []
    for place in filter(None, places):
        try:
            return open_folder(_whole_model(open_directory(place)), torch.float32)
        except CheckpointError as error:
            problems.append(str(error))
    why = "; ".join(problems) or "it was drawn from the seed, and no folder has it"
    raise CheckpointError(f"{path} has adapters of a base that cannot be opened ({flag} names another): {why}")


def _whole_model(place: AnyPath) -> AnyPath:
    """Return the checkpoint or the Hugging Face folder of a place. Raises CheckpointError if it has adapters alone."""
    if CheckpointConfig(load=str(place)).loads_huggingface:
        folder, has_adapters = place, not (place / "config.json").is_file()
    else:
        folder = resolve(place)
        adapters = saved_section(folder, manifest.read_manifest(folder).config, AdaptersConfig)
        has_adapters = adapters.lora_rank is not None
    if has_adapters:
        raise CheckpointError(f"{folder} has adapters itself")
    return folder


def _with_base(
    path: AnyPath,
    config: Mapping[str, Any],
    adapters: AdaptersConfig,
    model: ModelConfig,
    own: Source,
    place: str | None,
) -> Adapters:
    """Return the adapters of a checkpoint, whose tensors and modules' state are in `own`, with their base.

    `place`: where it is now; None: where it was. Raises CheckpointError if it cannot be opened, or has other weights,
    or if adapters are damaged.
    """
    base = open_base(path, [place or named_base(path, config)], "--base of generate, evaluate and convert")
    function, changed = with_rotary_of(base.config, model)  # as a run may change them, with weights that stay
    alone, own_function = (without_depths(without_indexers(each)) for each in (function, model))
    check_same_function(base.what, alone, own_function)
    tensors = tensors_of_training(model)
    weights = [name for name in tensors if not name.startswith(STATE)]
    if missing := [name for name in weights if name not in base.source.tensors]:
        raise CheckpointError(f"{base.what}, the base of the adapters in {path}, lacks {', '.join(missing[:8])}")
    dtype, precise = getattr(torch, saved_section(path, config, TrainingConfig).dtype), kept_in_fp32(model)

    def dtype_of(name: str) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32) if name in precise else dtype

    expected = config.get(BASE, {}).get("fingerprint")
    if fingerprint_of(base.source, weights, dtype_of, places=has_places(expected)) != expected:
        raise CheckpointError(
            f"{path} has adapters of other weights than {base.what} has now: bring these back, or name their folder "
            "(--base)"
        )
    factors = Renamed(own, {name: name for name in own.tensors if not name.startswith(STATE)})
    check_finite(factors, path)
    states = Renamed(own, {name: name for name in own.tensors if name.startswith(STATE)})
    source = Joined(Renamed(base.source, {name: name for name in weights}), states)
    return Adapters(adapters, source, factors, tensors, base.path, changed)


def write_megalite(
    opened: OpenedModel,
    directory: Path,
    *,
    dtype: torch.dtype | None,
    layout: ParallelConfig | None,
    workers: int,
    advance: Advance,
) -> Path:
    """Write a model as a checkpoint of step 0 into a run directory, with its tokenizer, and return the new folder.

    `dtype`: dtype to cast to; None: the widest dtype in the model. `layout`: layout for which one file per rank is
    written; None: files of equal size. Raises CheckpointError if the disk fails, or if the directory already has this
    checkpoint.
    """
    dtype = dtype or opened.dtype
    names = {name if name.startswith(STATE) else MODEL + name: name for name in opened.source.tensors}
    source = Renamed(opened.source, names, dtype, kept_in_fp32(opened.config))
    if layout is None:
        cut = cut_evenly(source.tensors, -(-sum(kind.size for kind in source.tensors.values()) // FILE))
    else:
        cut = cut_by_weights(source.tensors, weights_of_ranks(opened.config, layout))
    tokenizer = directory / "tokenizer"
    data = dict(opened.data)
    if opened.folder is not None and data.get("tokenizer_model"):
        with writing(tokenizer):
            tokenizer.mkdir(parents=True, exist_ok=True)
            copy_companions(opened.folder, tokenizer, "config.json")  # which names the family of the model
        model = Path(data["tokenizer_model"])
        data["tokenizer_model"] = str((tokenizer if model.is_dir() else tokenizer / model.name).resolve())
    run = RunConfig(  # a run that could have saved this model, with the fields that a checkpoint needs
        model=opened.config,
        data=DataConfig(seq_length=opened.sequence_length or 1024, eos_token_ids=opened.ends, **data),
        optimizer=OptimizerConfig(lr=0.0),
        training=TrainingConfig(micro_batch_size=1, **_FLAGS[dtype]),
    )
    return write_checkpoint(source, TrainingState(0, 0, 0), asdict(run), directory, cut, workers, advance)


def weights_of_ranks(
    model: ModelConfig, parallel: ParallelConfig, adapters: AdaptersConfig = _WITHOUT_ADAPTERS
) -> Iterator[list[tuple[str, Box]]]:
    """Yield for each rank the boxes of weights and modules' state that it would save.

    The number of ranks is the smallest one that the layout allows. The model of each rank is built on the meta device.
    Raises ConfigurationError if the model cannot be divided in this way.
    """
    check_divides(model, parallel)
    parts = stage_layers(model, parallel)
    stages = Stages(parallel.pipeline_model_parallel_size, virtual_stages(model, parallel))
    size = parallel.ranks_needed
    world = ParallelMesh(world_size=size, **parallel.mesh_sizes)

    def contents_at(mesh: ParallelMesh) -> Contents:
        held = [parts[stage] for stage in stages.of_rank(mesh.coordinate("pp"))]
        ranks = mesh.ranks("pp")
        chunks = make_chunks(model, mesh, held, tuple(ranks[end] for end in stages.ends))
        for chunk in chunks:
            train_a_part(chunk, adapters)
        return Contents.of(chunks, mesh, DataParallel(torch.float32))

    saves_frozen = adapters.lora_rank is None
    plan = Plan(world, contents_at, OptimizerConfig(lr=0.0), zero_stage=0, instances=1, saves_frozen=saves_frozen)
    for rank in range(size):
        yield [(part.name, part.box) for part in plan.saved(rank) if not is_optimizer_state(part.name)]


def check_divides(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigurationError if the model cannot be divided equally among the ranks."""
    if parallel.pipeline_model_parallel_size < 1:
        raise ConfigurationError("--pipeline-model-parallel-size must be at least 1")
    if problems := uneven_widths(model, parallel.tensor_model_parallel_size):
        raise ConfigurationError("\n".join(problems))

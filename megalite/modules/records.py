"""Records for the parameters of plain modules: each `nn.Parameter` becomes a `Parameter` with a `Sharding`.

The tensors of a plain module are whole on every rank of its stage. A name is that of the tensor within its stage, so
stages must be containers that name their parts as the whole network does, for example by the number of each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from megalite.errors import MegaliteError
from megalite.modules.alike import check_apart
from megalite.optim.buckets import ParameterBucket
from megalite.parallel.collectives import all_gather_json
from megalite.parallel.initialization import initial_values, set_initial_values
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter, named_pieces
from megalite.parallel.sharding import AsBuilt, Box, Drawn, LogicalTensor, Piece, Sharding, Use
from megalite.pipeline.stages import Stages

Initial = Callable[[str, torch.Generator, tuple[int, ...]], Tensor]
"""Function from a name, a generator on the CPU and a shape to initial values."""
SEQUENCE_PARALLEL = "sequence_parallel"
"""Attribute of a plain parameter, as in Megatron-LM: true if each tensor-parallel rank applies it to its own tokens."""
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def decays(name: str, values: Tensor) -> bool:
    """Tell if weights decay, by Megatron-LM's rule: vectors do not."""
    return values.dim() >= 2


def matrix_pattern(module: nn.Module, values: Tensor) -> str | None:
    """Return the view of a module's parameter as matrices, for Muon: [out, in] or, for kernels, [out, in * ...]."""
    if isinstance(module, (*EMBEDDINGS, *NORMS)) or values.dim() < 2:
        return None
    if values.dim() == 2:
        return "rows columns -> 1 rows columns"
    if not isinstance(module, CONVOLUTIONS):
        return None
    columns = " ".join(f"d{number}" for number in range(1, values.dim()))
    return f"rows {columns} -> 1 rows ({columns})"


class _Whole(Parameter):
    """Parameter of any shape. One without dimensions always has memory, which looks as if it had none."""

    def allocate(self) -> None:
        if self.dim():
            super().allocate()


def give_records(
    modules: Sequence[nn.Module],
    mesh: ParallelMesh,
    stages: Stages | None = None,
    *,
    weight_decay: Callable[[str, Tensor], bool] = decays,
    initial: Initial | None = None,
    seed: int = 0,
    splits_sequences: bool = False,
) -> list[dict[str, int]]:
    """Replace each plain parameter of this rank's stages, in place. Those with a `Sharding`, of parallel layers, stay.

    A parameter that requires no gradient stays frozen. A parameter object in several stages is a tied weight.

    Args:
        modules: all stages, in order, each of them built alike on every rank. Those of other ranks are not changed, and
            may be on the meta device.
        stages: their placement on ranks; None: all are on this rank.
        initial: draws initial values; None: values are those that the modules have. Frozen parameters and buffers are
            drawn, the latter with `seed`, if they are on the meta device.
        splits_sequences: tensor-parallel ranks have parts of the sequences between layers. Each plain parameter then
            has the attribute `sequence_parallel`, which tells if its gradient is of the rank's part.

    Returns:
        For each stage of this rank, by chunk: the numbers of the uses of trained weights that an earlier stage of the
        rank has too, by their names in the module.

    Raises:
        MegaliteError: two parameters have one name, or one has no values or is on another device than the mesh.
    """
    stages = stages or Stages(1, len(modules))
    if len(modules) != stages.count:
        raise MegaliteError(f"there are {len(modules)} modules for {stages.count} stages: give one for each")
    check_apart(modules)
    holders = _holders(modules)
    if splits_sequences:
        _require_marks(holders.values())
    own = stages.of_rank(mesh.coordinate("pp"))
    made: dict[int, tuple[nn.Parameter, Parameter]] = {}  # by the id of the old one, which must stay alive
    found = []
    for number in own:
        uses = dict[str, int]()
        for owner, key, name, old in _parameters_of(modules[number]):
            where = holders[id(old)]
            if isinstance(old, Parameter) and id(old) not in made:
                old.sharding = _by_rules(old, weight_decay, initial)
                continue
            if id(old) not in made:
                decay, pattern = weight_decay(where.name, old), matrix_pattern(owner, old)
                is_drawn = initial is not None and (old.requires_grad or old.is_meta)
                draw = _drawn(initial, where.name, old.shape) if initial and is_drawn else AsBuilt()
                is_table = isinstance(owner, EMBEDDINGS)
                shape = tuple(old.shape) or (1,)
                tensor = LogicalTensor(where.name, shape, draw, decay, pattern, is_embedding_or_output=is_table)
                sharding = _sharding(tensor, where.stages, mesh, stages)
                if splits_sequences and old.requires_grad and getattr(old, SEQUENCE_PARALLEL):
                    sharding = replace(sharding, grad_is_partial=True)
                made[id(old)] = old, _parameter(old, sharding, mesh)
            setattr(owner, key, made[id(old)][1])
            before = [stage for stage in own if stage in where.stages].index(number)
            if before and old.requires_grad:
                uses[name] = before
        _fill_buffers(modules[number], mesh, initial, seed)
        found.append(uses)
    return found


def _require_marks(holders: Iterable[_Holders]) -> None:
    """Raise MegaliteError if a plain parameter does not say whether its gradient is of this rank's tokens alone."""
    for each in holders:
        trained = each.parameter.requires_grad and not isinstance(each.parameter, Parameter)
        if trained and not hasattr(each.parameter, SEQUENCE_PARALLEL):
            raise MegaliteError(
                f"with sequence parallelism, the gradient of {each.name} is of part of the tokens if its module has a "
                "part of the sequence: use megalite.LayerNorm or another parallel layer, or give the parameter the "
                "attribute sequence_parallel, True if it has a part and False if it has whole sequences"
            )


def value_setter(modules: Iterable[nn.Module], seed: int) -> Callable[[Parameter], None]:
    """Return the `set_values` of `make_optimizer`: it keeps the values that plain modules have and draws the others."""
    kept = {
        id(parameter): parameter.detach()
        for module in modules
        for parameter, piece in named_pieces(module)
        if isinstance(piece.tensor.initial, AsBuilt)
    }

    def set_values(parameter: Parameter) -> None:
        if id(parameter) in kept:
            parameter.data.copy_(kept.pop(id(parameter)))
        else:
            set_initial_values(parameter, seed)

    return set_values


def matrix_names(modules: Iterable[nn.Module], optimizer: str = "") -> list[str]:
    """Return the names of the tensors that Muon updates as matrices. If there are none, Muon would be AdamW.

    `optimizer`: the name of the optimizer that updates them, if there are several.
    """
    pieces = (piece for module in modules for each, piece in named_pieces(module) if each.requires_grad)
    tensors = (piece.tensor for piece in pieces if piece.tensor.optimizer == optimizer)
    return list(dict.fromkeys(tensor.name for tensor in tensors if tensor.matrices is not None))


def check_tied_buckets(buckets: Sequence[ParameterBucket], mesh: ParallelMesh) -> None:
    """Check that pipeline ranks that share weights have them in equal buckets. Called by all ranks together.

    Raises:
        MegaliteError: they do not, so that gradients of different weights would be added, or parts saved twice.
    """
    own = [
        (bucket.layout.slots[0].parameter.sharding.partial_group, list(bucket.layout.pieces(0, bucket.length)))
        for bucket in buckets
    ]
    first: dict[tuple[int, ...], object] = {}
    for tied in all_gather_json([each for each in own if each[0]], mesh, "pp"):
        shared: dict[tuple[int, ...], list[object]] = {}
        for ranks, pieces in tied:
            shared.setdefault(tuple(ranks), []).append(pieces)
        for ranks, those in shared.items():
            if first.setdefault(ranks, those) != those:
                raise MegaliteError(
                    f"the stages on ranks {', '.join(map(str, ranks))} share several weights in different orders or "
                    f"numbers: {_names(first[ranks])} and {_names(those)}. Let each stage have the same ones, in the "
                    "same part and in the same order"
                )


@dataclass
class _Holders:
    """A parameter's name in the first stage that has it, and the stages that have it."""

    parameter: nn.Parameter
    name: str
    stages: list[int]
    places: int = 0


def _holders(modules: Sequence[nn.Module]) -> dict[int, _Holders]:
    """Return where each parameter is, by its id: its name, its stages and the number of its places.

    Raises MegaliteError for two parameters of one name, and for a parallel layer's weight in several places.
    """
    found: dict[int, _Holders] = {}
    named: dict[str, tuple[int, int]] = {}
    for stage, module in enumerate(modules):
        for _, _, name, parameter in _parameters_of(module):
            where = found.setdefault(id(parameter), _Holders(parameter, name, []))
            where.stages += [stage] if stage not in where.stages else []
            where.places += 1
            pieces = parameter.sharding.pieces if isinstance(parameter, Parameter) else ()
            if isinstance(parameter, Parameter) and where.places > len(parameter.sharding.uses):
                raise MegaliteError(
                    f"{parameter.sharding.name} of a parallel layer is in several places: only plain modules can share "
                    "a weight"
                )
            for each in [piece.tensor.name for piece in pieces] or [where.name]:
                other, earlier = named.setdefault(each, (id(parameter), stage))
                if other != id(parameter):
                    raise MegaliteError(
                        f"two parameters are called {each}, in stage {earlier} and in stage {stage}: name the parts of "
                        "each stage as in the whole network, for example by their numbers in it"
                    )
    return found


def _parameters_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    """Yield every place of every parameter: the module and the attribute, with the parameter's first name."""
    first: dict[int, str] = {}
    for path, owner in module.named_modules():
        for key, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            name = first.setdefault(id(parameter), f"{path}.{key}" if path else key)
            if isinstance(parameter, UninitializedParameter):
                raise MegaliteError(f"{name} of a lazy module has no shape yet: call the module once before")
            yield owner, key, name, parameter


def _sharding(tensor: LogicalTensor, holders: Sequence[int], mesh: ParallelMesh, stages: Stages) -> Sharding:
    """Return the record of a plain parameter that these stages have.

    Raises MegaliteError if pipeline ranks share it under tensor parallelism.
    """
    ranks = sorted({stages.place(stage)[0] for stage in holders})
    here = sum(stages.place(stage)[0] == mesh.coordinate("pp") for stage in holders)
    if len(ranks) > 1 and mesh.size("tp") > 1:
        raise MegaliteError(
            f"{tensor.name} is shared by stages on different pipeline ranks, which plain modules can do only without "
            "tensor parallelism: use --tp 1, or a vocabulary-parallel embedding"
        )
    replicas = mesh.ranks("tp") if len(ranks) == 1 else tuple(mesh.ranks("pp")[rank] for rank in ranks)
    piece = Piece(tensor, Box.whole(tensor.shape), 0, tensor.shape[0])
    uses = tuple(Use(chunk=chunk) for chunk in range(here))
    return Sharding(tensor.shape, (piece,), replicas, grad_is_partial=len(ranks) > 1, uses=uses)


def _by_rules(parameter: Parameter, weight_decay: Callable[[str, Tensor], bool], initial: Initial | None) -> Sharding:
    """Return the record of a parallel layer's parameter with the weight decay and the initial values of the rules."""
    pieces = []
    for piece in parameter.sharding.pieces:
        tensor = piece.tensor
        if weight_decay is not decays:
            tensor = replace(tensor, weight_decay=weight_decay(tensor.name, parameter))
        if initial is not None:
            tensor = replace(tensor, initial=_drawn(initial, tensor.name, tensor.shape))
        pieces.append(replace(piece, tensor=tensor))
    return replace(parameter.sharding, pieces=tuple(pieces))


def _parameter(old: nn.Parameter, sharding: Sharding, mesh: ParallelMesh) -> Parameter:
    """Return a parameter with a record in place of a plain one. Raises MegaliteError for whole numbers."""
    name, scalar = sharding.name, not old.dim()
    if not old.is_floating_point():
        raise MegaliteError(f"{name} is of {old.dtype}, and parameters are floating-point numbers: make it a buffer")
    built = isinstance(sharding.pieces[0].tensor.initial, AsBuilt)
    if built:
        _check_place(name, old, mesh)
    made = _Whole(replace(sharding, local_shape=() if scalar else sharding.local_shape), old.dtype, mesh.device)
    if built:
        made.data = old.detach().contiguous()
    made.requires_grad_(old.requires_grad)
    return made


def _check_place(name: str, tensor: Tensor, mesh: ParallelMesh) -> None:
    if tensor.device.type == mesh.device.type:
        return
    if tensor.device.type == "meta":
        raise MegaliteError(
            f"{name} is on the meta device and has no values: give initial=, a function that draws them"
        )
    raise MegaliteError(f"{name} is on {tensor.device}, and this rank computes on {mesh.device}: move the module there")


def _drawn(initial: Initial, name: str, shape: Sequence[int]) -> Drawn:
    return Drawn(lambda generator: initial(name, generator, tuple(shape)))


def _values(name: str, old: Tensor, mesh: ParallelMesh, initial: Initial | None, seed: int) -> Tensor:
    """Return the values of a buffer: those that it has or, on the meta device, drawn ones."""
    if initial is None or old.device.type != "meta" or mesh.device.type == "meta":
        _check_place(name, old, mesh)
        return old.detach().contiguous()
    shape = tuple(old.shape)
    tensor = LogicalTensor(name, shape, _drawn(initial, name, old.shape), weight_decay=False)
    return initial_values(tensor, Box.whole(shape), seed).to(mesh.device, old.dtype)


def _fill_buffers(module: nn.Module, mesh: ParallelMesh, initial: Initial | None, seed: int) -> None:
    for path, owner in module.named_modules():
        for key, buffer in list(owner.named_buffers(recurse=False)):
            name = f"{path}.{key}" if path else key
            if buffer.device.type != mesh.device.type:
                setattr(owner, key, _values(name, buffer, mesh, initial, seed))


def _names(buckets: object) -> str:
    """Return the names of the weights, in brackets those that are in one bucket."""
    return ", ".join(str([name for name, *_ in bucket]) for bucket in buckets) if isinstance(buckets, list) else ""

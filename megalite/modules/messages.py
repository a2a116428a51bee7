"""Messages between stages of plain modules, found by one run of all stages on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megalite.errors import MegaliteError
from megalite.modules.calling import Layers, arguments_of_stage, goes_by_position, named, results
from megalite.modules.forward_state import ForwardState
from megalite.parallel.nested import map_tensors
from megalite.parallel.parameter import Parameter
from megalite.parallel.stage import TensorSpec

META = torch.device("meta")
Message = tuple[TensorSpec, ...]


class NotOnMetaError(MegaliteError):
    """A stage cannot run on the meta device, or does not fit its inputs."""


@dataclass(frozen=True)
class StagePlan:
    """Place of a stage among the others.

    Attributes:
        passes: the tensors that it passes on, its own or those of earlier stages.
        blocks: names of its submodules that together own all parameters and run once each, in this order; empty if it
            has none or if they are not known.
        changes_inputs: True if it changes its inputs in place, so that it needs copies of them.
    """

    passes: Message = ()
    blocks: tuple[str, ...] = ()
    changes_inputs: bool = False


def find_messages(
    modules: Sequence[nn.Module], values: Any, declared: Sequence[Message] | None = None
) -> list[StagePlan]:
    """Run copies of all stages on the meta device, and return what each stage passes on and which blocks it runs.

    Args:
        values: a micro-batch as the collate function returns it, on any device.
        declared: what each stage except the last passes on; then nothing is run, and each stage is one block.

    Raises:
        MegaliteError: a stage does not fit the one before it, or cannot run on the meta device.
    """
    if declared is not None:
        _check_declared(modules, declared)
        return [StagePlan(tuple(passes)) for passes in (*declared, ())]
    live: dict[str, tuple[int, Tensor]] = {}  # tensors by name, with the stage that made each
    passes: list[dict[str, TensorSpec]] = [{} for _ in modules]
    runs = []
    for number, run in enumerate(runs_on_meta(modules, values)):
        runs.append(run)
        for name, (made_by, tensor) in live.items():
            if name not in run.taken:
                continue
            spec = TensorSpec(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            for before in range(made_by, number):
                passes[before][name] = spec
        live = {name: each for name, each in live.items() if not goes_by_position(name)}
        live |= {name: (number, tensor) for name, tensor in run.results.items()}
    return [
        StagePlan(tuple(specs.values()), run.blocks, run.changes_inputs)
        for specs, run in zip(passes, runs, strict=True)
    ]


@dataclass(frozen=True)
class MetaRun:
    """A run of a stage on the meta device: the names of inputs that it took, its results, and facts of `StagePlan`."""

    taken: set[str]
    results: dict[str, Tensor]
    blocks: tuple[str, ...]
    changes_inputs: bool


def runs_on_meta(modules: Sequence[nn.Module], values: Any) -> Iterator[MetaRun]:
    """Run copies of the stages on the meta device, one after the other."""
    values, inputs = _to_meta(values), dict[str, Tensor]()
    for number, module in enumerate(modules):
        alike = copies_on_meta([module])[0]
        try:
            copied = {name: tensor.clone() for name, tensor in inputs.items()}
            by_position, by_name, taken = arguments_of_stage(number, alike, copied, values)
            with ForwardState().unchanged(), torch.enable_grad(), META, _BlockWatch(alike) as watch:
                output = alike(*by_position, **by_name)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            where = alike.running() if isinstance(alike, Layers) else named(number, module)
            raise NotOnMetaError(
                f"{where} failed on the meta device, where the tensors that stages pass on are found: "
                f"{str(error).splitlines()[0]}. If it runs on real tensors, declare the messages between stages instead"
            ) from error
        found = results(number, module, output)
        yield MetaRun(taken, found, watch.blocks(output), any(tensor._version for tensor in copied.values()))
        inputs = {name: tensor for name, tensor in inputs.items() if not goes_by_position(name)} | found
        inputs = {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in inputs.items()}


def copies_on_meta(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Copy modules without their values. A parameter that several have is one in the copies, too.

    Copies of layers that communicate have the shapes of the originals, since nothing is sent on the meta device.
    """
    known: dict[int, Any] = {}
    for part in (part for module in modules for part in module.modules()):
        for value in (*vars(part).values(), *part.buffers(recurse=False), *part.parameters(recurse=False)):
            if isinstance(value, Parameter):
                known[id(value)] = Parameter(value.sharding, value.dtype, META).requires_grad_(value.requires_grad)
            elif isinstance(value, nn.Parameter):
                known[id(value)] = nn.Parameter(torch.empty_like(value, device=META), value.requires_grad)
                vars(known[id(value)]).update(vars(value))
            elif isinstance(value, Tensor):
                known[id(value)] = torch.empty_like(value, device=META, requires_grad=False)
    try:
        return [copy.deepcopy(module, known) for module in modules]
    except TypeError as error:
        raise MegaliteError(
            f"a module of {', '.join(type(module).__name__ for module in modules)} cannot be copied ({error}): keep "
            "such an object out of its attributes, or give a function that builds the module"
        ) from error


def _to_meta(values: Any) -> Any:
    return map_tensors(lambda tensor: torch.empty_like(tensor, device=META, requires_grad=False), values)


def _check_declared(modules: Sequence[nn.Module], declared: Sequence[Message]) -> None:
    if len(declared) != len(modules) - 1:
        raise MegaliteError(f"{len(declared)} messages are declared for the borders of {len(modules)} stages")
    for spec in (spec for message in declared for spec in message):
        if spec.shape is None or spec.dtype is None:
            raise MegaliteError(f"the message {spec.name} is declared without its shape or dtype")
        if spec.gradient and not spec.dtype.is_floating_point:
            raise MegaliteError(f"the message {spec.name} of {spec.dtype} can have no gradient: set gradient=False")


class _BlockWatch(TorchFunctionMode):
    """Watch of which submodules run in which order, and whether each parameter is used only within its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        parts = {name: part for name, part in parts_of(module) if next(part.parameters(), None) is not None}
        self._names = tuple(parts)
        of_parts = [{id(each): number for each in part.parameters()} for number, part in enumerate(parts.values())]
        self._part_of = {key: number for owned in of_parts for key, number in owned.items()}
        owned = sum(map(len, of_parts))
        self._in_parts = owned == len(self._part_of) == len(list(module.parameters()))
        self._order: list[int] = []
        self._running: list[int] = []
        for number, part in enumerate(parts.values()):
            part.register_forward_pre_hook(lambda *_, number=number: self._begin(number))
            part.register_forward_hook(lambda _, __, output: self._end(output))

    def blocks(self, output: Any) -> tuple[str, ...]:
        """Return the names of the submodules, if they are blocks."""
        in_order = self._order == list(range(len(self._names)))
        return self._names if self._in_parts and in_order else ()

    def _begin(self, number: int) -> None:
        self._in_parts = self._in_parts and not self._running
        self._order.append(number)
        self._running.append(number)

    def _end(self, output: Any) -> None:
        self._running.pop()
        self._in_parts = self._in_parts and _is_of_tensors(output)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) or (isinstance(result, tuple) and not isinstance(result, torch.Size)):
            for each in _flat((args, tuple((kwargs or {}).values()))):
                if id(each) in self._part_of and self._running[-1:] != [self._part_of[id(each)]]:
                    self._in_parts = False
        return result


def parts_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of a module with their names. Containers are replaced by their elements."""
    for name, child in module.named_children():
        if isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            yield from parts_of(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def _is_of_tensors(output: Any) -> bool:
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else None
    return (output is None or isinstance(output, Tensor)) if values is None else all(map(_is_of_tensors, values))


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _flat(value)
        else:
            yield value

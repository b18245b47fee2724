"""`fully_shard` of a script: which modules are units, in which formats; the rest of the script runs as on one rank.

    fully_shard(block, mp_policy=bf16)    parameters are replaced, in the format that is computed with; inputs are cast
    the trace                             whole parameters, as `lower.fsdp` takes them
    meta["spread"]                        units by path, what reshards, the format of sums, the shape of the mesh

PyTorch's FSDP1 is refused, and what of FSDP2 changes bytes in ways that are not predicted yet.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foretell.errors import ModelError
from foretell.trace.record.recorder import Recorder
from foretell.trace.record.step import cast_floats
from foretell.trace.script.ranks import ScriptRanks, asker, refusal
from foretell.trace.script.words import ScriptCommand

_MARK = "_foretell_sharded"
_ZERO = "ZeroRedundancyOptimizer"
_LOW = {torch.bfloat16: "fsdp-bf16", torch.float16: "fsdp-fp16"}
_PLACES = ("torch.distributed.fsdp", "torch.distributed.fsdp._fully_shard", "torch.distributed.fsdp._fully_shard._fully_shard",
           "torch.distributed._composable.fsdp", "torch.distributed._composable.fsdp.fully_shard")  # fmt: skip
_SILENT = ("set_is_last_backward", "set_requires_all_reduce", "set_gradient_divide_factor", "set_reduce_scatter_divide_factor", "reshard",
           "set_force_sum_reduction_for_comms", "set_post_optim_event", "reset_iter_state")  # fmt: skip
"""Methods of a sharded module that change no byte of a step."""
_LOUD = ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch", "set_reshard_after_backward", "set_custom_all_gather",
         "set_custom_reduce_scatter", "set_all_reduce_hook", "set_unshard_in_backward", "set_reduce_scatter_max_input_buffers")  # fmt: skip
"""Those that do, in ways that are not predicted."""


@dataclass
class FullyShardCall:
    """One call of `fully_shard`."""

    modules: list[nn.Module]
    reshard: bool | int | None
    dtype: torch.dtype | None
    """That parameters are gathered in, where it is not their own."""
    reduce: torch.dtype | None
    shape: tuple[int, ...]
    """Of the mesh: shards, or replicas and shards."""
    line: str


def precision_of(ranks: ScriptRanks) -> str:
    """What the policy says of formats; empty where it says nothing."""
    found = {_LOW[unit.dtype] for unit in ranks.units if unit.dtype is not None}
    return found.pop() if found else ""


def imported(script: ScriptCommand) -> None:
    """What a script may shard with, before anything is replaced: it takes a while, so where no launcher starts it, only by name."""
    text = ""
    with contextlib.suppress(OSError):
        text = Path(script.file).read_text(errors="replace") if script.file else ""
    if script.launched or "fsdp" in text:
        importlib.import_module("torch.distributed.fsdp")
        importlib.import_module("torch.distributed.tensor.parallel")
    if _ZERO in text:
        importlib.import_module("torch.distributed.optim")


def sharding(ranks: ScriptRanks, recorder: Recorder) -> Iterator[tuple[Any, str, Any]]:
    """What a script finds in place of FSDP, where that is imported."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return

    sharded = type("FSDPModule", (_Sharded,), {"ranks": ranks})

    def fully_shard(
        module: Any, *, mesh: Any = None, reshard_after_forward: bool | int | None = None, mp_policy: Any = None,
        offload_policy: Any = None, **more: Any,
    ) -> Any:  # fmt: skip
        for name, value in more.items():
            if value:
                raise ranks.refuse(f"fully_shard({name}=...) is not followed yet", "leave that out")
        if isinstance(offload_policy, fsdp.CPUOffloadPolicy):
            remedy = "leave offload_policy out; foretell plan has offloading of its own"
            raise ranks.refuse("fully_shard with CPUOffloadPolicy is not followed yet", remedy)
        if not dist.is_initialized():
            dist.init_process_group()
        modules = list(module) if isinstance(module, (list, tuple)) else [module]
        unit = _unit(ranks, modules, mesh, reshard_after_forward, mp_policy)
        ranks.units.append(unit)
        for one in modules:
            one.__class__ = _class_of(sharded, type(one))
        return module

    for place in _PLACES:
        owner = sys.modules.get(place)
        if owner is not None and callable(getattr(owner, "fully_shard", None)):
            yield owner, "fully_shard", fully_shard
        if owner is not None:
            yield owner, "FSDPModule", sharded
    remedy = "fully_shard(module) is what took its place in PyTorch"
    yield fsdp, "FullyShardedDataParallel", refusal(ranks, "FullyShardedDataParallel, FSDP's first edition, is not followed", remedy)
    yield from _others(ranks)
    yield recorder, "_unrecorded", _deriving(ranks, recorder)


def _deriving(ranks: ScriptRanks, recorder: Recorder) -> Any:
    """Ops before the step, watched: what is made of a sharded parameter in its shape (a mean of its past, a moment) is sharded too."""
    plain = recorder._unrecorded

    def is_sharded(value: Any) -> bool:
        if isinstance(value, nn.Parameter) and not hasattr(value, _MARK):
            mine = (one for unit in ranks.units for module in unit.modules for one in module.parameters())
            setattr(value, _MARK, any(one is value for one in mine))
        return isinstance(value, Tensor) and getattr(value, _MARK, False)

    def run(func: Any, kinds: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        output = plain(func, kinds, args, kwargs)
        if ranks.units and isinstance(output, Tensor) and any(is_sharded(one) and one.shape == output.shape for one in args):
            setattr(output, _MARK, True)
            if output.layout is torch.strided:
                ranks.derived[recorder.storage_id(output)] = (list(output.shape), str(output.dtype)[6:])
        return output

    return run


def _others(ranks: ScriptRanks) -> Iterator[tuple[Any, str, Any]]:
    """Other ways to spread a model."""
    tensors, parallel, optim = (sys.modules.get(f"torch.distributed.{name}") for name in ("tensor", "tensor.parallel", "optim"))
    what = "tensor parallelism in a script is not followed yet"
    plan = "foretell plan MODEL --on HW finds and predicts it for the plain model"
    for owner, name in ((parallel, "parallelize_module"), (tensors, "distribute_tensor"), (tensors, "distribute_module")):
        yield owner, name, refusal(ranks, f"{name}: {what}", plan)
    yield optim, _ZERO, refusal(ranks, f"{_ZERO} is not followed yet", "fully_shard shards states too")


_known: dict[tuple[type, type], type] = {}


def _class_of(sharded: type, plain: type) -> type:
    if issubclass(plain, sharded):
        return plain
    if (sharded, plain) not in _known:
        _known[sharded, plain] = type(f"FSDP{plain.__name__}", (sharded, plain), {"__module__": plain.__module__})
    return _known[sharded, plain]


class _Sharded:
    """What a module has more once it is sharded."""

    ranks: ScriptRanks

    def set_requires_gradient_sync(self, requires: bool, **_: Any) -> None:
        if not requires:
            what = "set_requires_gradient_sync(False) keeps whole gradients between micro-batches: not predicted yet"
            raise self.ranks.refuse(what, "leave it out: gradients are then scattered after each micro-batch")

    def set_reshard_after_forward(self, reshard: bool | int, recurse: bool = True) -> None:
        inside = {id(one) for one in self.modules()} if recurse else {id(self)}  # type: ignore[attr-defined]
        for unit in self.ranks.units:
            if id(unit.modules[0]) in inside:
                unit.reshard = reshard

    def unshard(self, async_op: bool = False) -> Any:
        from foretell.trace.script.ranks import DoneCollective

        return DoneCollective() if async_op else None

    def __getattr__(self, name: str) -> Any:
        if name in _SILENT:
            return lambda *_, **__: None
        if name in _LOUD:
            return refusal(self.ranks, f"{name} changes what is held at once: not predicted yet", "leave it out")
        return super().__getattr__(name)  # type: ignore[misc]


# --- one call ----------------------------------------------------------------------------------------------------------


def _unit(ranks: ScriptRanks, modules: list[nn.Module], mesh: Any, reshard: bool | int | None, policy: Any) -> FullyShardCall:
    shape = (ranks.world,) if mesh is None else tuple(int(mesh.size(dim)) for dim in range(mesh.ndim))
    asked = 1
    for size in shape:
        asked *= size
    if len(shape) > 2 or asked != ranks.world:
        text = " x ".join(map(str, shape))
        raise ranks.refuse(
            f"fully_shard over a mesh of {text} of {ranks.world} ranks: the others share something else, which is not followed yet",
            "a mesh of all ranks: (shards,) or (replicas, shards); foretell plan MODEL predicts others",
        )  # fmt: skip
    dtype, reduce = getattr(policy, "param_dtype", None), getattr(policy, "reduce_dtype", None)
    taken = {id(one) for unit in ranks.units for module in unit.modules for one in module.parameters()}
    own = [one for module in modules for one in module.parameters() if id(one) not in taken]
    if not ranks.units:
        _refuse_trained(ranks, own)
    low = _low(ranks, own, dtype)
    _replace(modules, {id(one) for one in own}, low)
    for module in modules:
        _cast(module, policy)
    if any(unit.shape != shape for unit in ranks.units):
        raise ranks.refuse("fully_shard over another mesh than before", "one mesh for all modules")
    return FullyShardCall(modules, reshard, low, reduce, shape, asker())


def _refuse_trained(ranks: ScriptRanks, own: list[nn.Parameter]) -> None:
    from foretell.trace.script.made import optimizers

    mine = {id(one) for one in own}
    for one in optimizers().values():
        if any(id(parameter) in mine for group in one.param_groups for parameter in group["params"]):
            what = "fully_shard after the optimizer was made, which then trains parameters that are gone"
            raise ranks.refuse(what, "make the optimizer afterwards")


def _low(ranks: ScriptRanks, own: list[nn.Parameter], dtype: torch.dtype | None) -> torch.dtype | None:
    """The format that parameters are gathered in, where it is another than theirs."""
    kept = {one.dtype for one in own if one.is_floating_point()}
    if dtype is None or not kept or kept == {dtype}:
        return None
    if kept != {torch.float32} or dtype not in _LOW:
        names = ", ".join(sorted(str(one)[6:] for one in kept))
        what = f"MixedPrecisionPolicy(param_dtype={str(dtype)[6:]}) of {names} parameters is not predicted yet"
        raise ranks.refuse(what, "keep parameters in float32")
    other = next((unit.dtype for unit in ranks.units if unit.dtype not in (None, dtype)), None)
    if other is not None:
        raise ranks.refuse(f"fully_shard in {str(dtype)[6:]} beside {str(other)[6:]}", "one policy for all modules")
    return dtype


def _replace(modules: list[nn.Module], own: set[int], dtype: torch.dtype | None) -> None:
    """New parameters, as FSDP2 makes them, in the format that is computed with."""
    done: dict[int, nn.Parameter] = {}
    for module in itertools.chain.from_iterable(one.modules() for one in modules):
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in own:
                if id(parameter) not in done:
                    value = parameter.detach()
                    cast = value.to(dtype) if dtype is not None and value.is_floating_point() else value
                    done[id(parameter)] = nn.Parameter(cast, parameter.requires_grad)
                module._parameters[name] = done[id(parameter)]


def _cast(module: nn.Module, policy: Any) -> None:
    """Float inputs, and outputs, in the policy's formats."""
    dtype, out = getattr(policy, "param_dtype", None), getattr(policy, "output_dtype", None)
    if dtype is not None and getattr(policy, "cast_forward_inputs", True):
        module.register_forward_pre_hook(lambda _, args, kwargs: cast_floats((args, kwargs), dtype), with_kwargs=True)
    if out is not None:
        module.register_forward_hook(lambda _, args, output: cast_floats(output, out))


# --- afterwards --------------------------------------------------------------------------------------------------------


def spread_of(ranks: ScriptRanks, model: nn.Module) -> dict[str, Any]:
    """The same by paths of the whole model, as data."""
    paths = {id(module): path for path, module in model.named_modules()}
    calls = [(unit, [paths[id(module)] for module in unit.modules]) for unit in ranks.units if all(id(one) in paths for one in unit.modules)]
    roots = [(unit, own) for unit, own in calls if not any(_within(own[0], other) for one, others in calls for other in others if one is not unit)]
    if len(roots) != 1 or len(roots[0][1]) != 1:
        raise _no_root([unit for unit, _ in roots])
    (root, (top,)) = roots[0]
    units, reshard = [], {}
    for unit, own in calls:
        if unit is root:
            continue
        if any(_within(other, path) for one, others in calls if one is not unit for other in others for path in own):
            ranks.tell(f"{own[0]} is sharded with modules inside that are sharded too: what is left of it is taken to be the root's")
            continue
        units.append(own)
        reshard[own[0]] = True if unit.reshard is None else unit.reshard
    if root.reshard:
        reshard[""] = root.reshard
    owners = {path.rpartition(".")[0] for path, _ in model.named_parameters()}
    *replicas, shards = root.shape
    reduce = next((str(unit.reduce)[6:] for unit, _ in calls if unit.reduce is not None), None)
    derived = {str(number): made for number, made in ranks.derived.items()}
    left = sorted(one for one in owners if not _within(one, top))
    return {
        "kind": "fsdp", "world": ranks.world, "replicate": replicas[0] if replicas else 1, "shards": shards,
        "how": {"units": units, "reshard": reshard, "reduce": reduce, "left": left, "derived": derived},
    }  # fmt: skip


def _within(path: str, other: str) -> bool:
    return not other or path == other or path.startswith(f"{other}.")


def _no_root(roots: Sequence[FullyShardCall]) -> ModelError:
    lines = ", ".join(dict.fromkeys(unit.line for unit in roots))
    what = f"fully_shard is called on {len(roots)} modules side by side ({lines}), and on none that holds them"
    return ModelError(what, "call it on the whole model last")


@contextmanager
def whole_tensors() -> Iterator[None]:
    """Until the end of the block plain tensors have what DTensors have: here a tensor is whole."""
    names = [name for name in ("full_tensor", "to_local") if not hasattr(Tensor, name)]
    for name in names:
        setattr(Tensor, name, lambda tensor, **_: tensor)
    try:
        yield
    finally:
        for name in names:
            delattr(Tensor, name)

"""What user code puts around a model or its parts and a trace sees through, or takes for what it becomes on the device.

    torch.compile, Module.compile      the function itself: a trace is of the eager step, and compiling is a way to run it
    torch.cond, while_loop, scan, map  the branch, the loop
    flex_attention                     compiled: one fused kernel over all positions; else spelled out, as PyTorch runs it then
    DistributedDataParallel, FSDP      the module inside; how many devices there are is asked outside
    torch.save, torch.load             what was saved, without a file
    DataLoader(num_workers=...)        samples are loaded by this process
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import _builtins
from torch.utils import _pytree as pytree

from foretell.trace.sandbox.devices import is_elsewhere
from foretell.trace.sandbox.replaced import replaced

Tell = Callable[[str], None]
Noted = list[tuple[nn.Module, str]]
"""Modules that are compiled, and how, as `--compile-how` names it."""
COMPILED = "torch.compile in the model's own code is left out: the step is traced as eager PyTorch runs it"


@contextmanager
def seen_through(tell: Tell, noted: Noted | None = None) -> Iterator[None]:
    """Until the end of the block; `tell` is told what was taken for something else."""
    compiled = _Compiled([] if noted is None else noted)
    with replaced((*_compiling(tell, compiled), *_control(), *_flex(tell, compiled), *_distributed(tell), *_files(), *_loaders())):
        yield


def compiled_as(noted: Noted, model: nn.Module, blocks: Sequence[str]) -> str:
    """How the whole model is compiled, or every block of it; empty where neither is."""
    known = {id(module): how for module, how in noted}
    each = {known.get(id(model.get_submodule(path))) for path in blocks}
    return known.get(id(model)) or ("blocks" if each == {"model"} else "")


class _Compiled:
    """What the code has compiled: with a module or any function of its own, attention inside it is fused too."""

    code = False

    def __init__(self, noted: Noted) -> None:
        self.noted = noted

    def module(self, model: nn.Module, mode: str | None = None, backend: Any = "inductor", options: Any = None, **_: Any) -> None:
        """Of one that Inductor compiles; other backends launch what eager code does."""
        recorded = mode in ("reduce-overhead", "max-autotune") or bool((options or {}).get("triton.cudagraphs"))
        if backend == "inductor":
            self.noted.append((model, "graphs" if recorded else "model"))


def _compiling(tell: Tell, compiled: _Compiled) -> Iterator[tuple[Any, str, Any]]:
    def compile(model: Any = None, **options: Any) -> Any:
        if options.get("disable"):
            return (lambda function: function) if model is None else model
        tell(COMPILED)
        fused = getattr(model, "fused", None)
        compiled.code |= fused is None
        if isinstance(model, nn.Module):
            compiled.module(model, **options)
        return (lambda function: function) if model is None else fused or model

    def compile_module(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("disable"):
            return
        tell(COMPILED)
        compiled.code = True
        compiled.module(module, **kwargs)

    script = torch.jit.script

    def scripted(*args: Any, **kwargs: Any) -> Any:
        if "/torch/" not in sys._getframe(1).f_code.co_filename:
            tell("TorchScript's functions are traced op by op: what it fuses and keeps for backward on its own is not")
        with _known_to_torchscript():
            return script(*args, **{**kwargs, "_frames_up": kwargs.get("_frames_up", 0) + 1})  # names are looked up where it is called

    yield torch.jit, "script", scripted
    yield torch, "compile", compile
    yield nn.Module, "compile", compile_module


@contextmanager
def _known_to_torchscript() -> Iterator[None]:
    """TorchScript knows torch's functions by identity: while it compiles, what a trace puts in the place of one is that one."""
    known = _builtins._get_builtin_table()
    ours = {
        id(function): f"aten::{name}" for module in (torch, torch._C._nn) for name, function in vars(module).items()
        if getattr(function, "__module__", "").startswith("foretell.") and id(function) not in known
    }  # fmt: skip
    known.update(ours)
    try:
        yield
    finally:
        for one in ours:
            known.pop(one, None)


def _files() -> Iterator[tuple[Any, str, Any]]:
    """Weights that are saved have no numbers: they are kept for whoever loads them, and nothing is written."""
    kept: dict[str, Any] = {}
    load = torch.load

    def save(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        kept[str(file)] = value

    def loaded(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if str(file) in kept:
            return copy.deepcopy(kept[str(file)])
        return load(file, "cpu" if is_elsewhere(map_location) else map_location, *args, **kwargs)

    yield torch, "save", save
    yield torch, "load", loaded


def _control() -> Iterator[tuple[Any, str, Any]]:
    def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
        return (true_fn if pred else false_fn)(*operands)

    def while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried_inputs: Any, *_: Any) -> Any:
        state = tuple(carried_inputs)
        while cond_fn(*state):
            state = tuple(body_fn(*state))
        return state

    def scan(combine_fn: Callable[..., Any], init: Any, xs: Any, *, dim: int = 0, reverse: bool = False) -> Any:
        leaves, form = pytree.tree_flatten(xs)
        steps = range(leaves[0].shape[dim])
        rows: list[Any] = []
        for step in reversed(steps) if reverse else steps:
            init, row = combine_fn(init, pytree.tree_unflatten([leaf.select(dim, step) for leaf in leaves], form))
            rows.append(row)
        ordered = rows[::-1] if reverse else rows
        return init, pytree.tree_map(lambda *parts: torch.stack(parts), *ordered)

    def associative_scan(combine_fn: Callable[..., Any], xs: Any, dim: int, reverse: bool = False, *_: Any, **__: Any) -> Any:
        from torch._higher_order_ops.associative_scan import generic_associative_scan

        leaves, form = pytree.tree_flatten(xs)
        leaves = [leaf.flip([dim]) for leaf in leaves] if reverse else leaves

        def combined(*parts: Any) -> list[Any]:
            first, second = parts[: len(leaves)], parts[len(leaves) :]
            return pytree.tree_leaves(combine_fn(pytree.tree_unflatten(first, form), pytree.tree_unflatten(second, form)))

        made = generic_associative_scan(combined, leaves, dim)
        return pytree.tree_unflatten([one.flip([dim]) for one in made] if reverse else made, form)

    def mapped(function: Callable[..., Any], xs: Any, *args: Any) -> Any:
        leaves, form = pytree.tree_flatten(xs)
        rows = [function(pytree.tree_unflatten(parts, form), *args) for parts in zip(*(leaf.unbind(0) for leaf in leaves), strict=True)]
        return pytree.tree_map(lambda *parts: torch.stack(parts), *rows)

    import torch._higher_order_ops as higher

    yield torch, "cond", cond
    for name, ours in {
        "cond": cond, "while_loop": while_loop, "scan": scan, "associative_scan": associative_scan, "map": mapped,
    }.items():  # fmt: skip
        yield higher, name, ours
        inside = sys.modules.get(f"torch._higher_order_ops.{name}")  # where code imports it from the file that has it
        if inside is not None:
            yield inside, name, ours
    control = sys.modules.get("functorch.experimental.control_flow")
    if control is not None:
        yield control, "cond", cond
        yield control, "map", mapped


def _loaders() -> Iterator[tuple[Any, str, Any]]:
    """Samples are loaded here: processes that load them would know nothing of fake tensors."""
    from torch.utils.data import DataLoader

    start = DataLoader.__init__

    @functools.wraps(start)
    def alone(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
        named = dict(zip(_LOADER, args, strict=False)) | kwargs
        for name in ("num_workers", "pin_memory", "timeout", "multiprocessing_context", "persistent_workers", "prefetch_factor", "worker_init_fn"):
            named.pop(name, None)
        start(self, dataset, **named)

    yield DataLoader, "__init__", alone


_LOADER = (
    "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout",
    "worker_init_fn", "multiprocessing_context", "generator",
)  # fmt: skip
"""What a DataLoader takes by its place, after the data."""


def _flex(tell: Tell, compiled: _Compiled) -> Iterator[tuple[Any, str, Any]]:
    def fused(
        query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None, block_mask: Any = None, scale: float | None = None,
        enable_gqa: bool = False, return_lse: bool = False, **_: Any,
    ) -> Any:  # fmt: skip
        tell("flex_attention is taken to be one fused kernel over all positions: no block is skipped")
        out = F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=enable_gqa)
        return (out, out.float().sum(-1)) if return_lse else out

    def flex_attention(query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None, *args: Any, **kwargs: Any) -> Any:
        if compiled.code:
            return fused(query, key, value, score_mod, *args, **kwargs)
        tell("flex_attention is not compiled: all scores are in memory, in fp32, as eager PyTorch holds them")
        if key.shape[1] != query.shape[1]:
            key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
        scores = (query @ key.transpose(-2, -1)).float() * (kwargs.get("scale") or query.shape[-1] ** -0.5)
        for asked in (score_mod, kwargs.get("block_mask")):
            scores = scores + 1 if asked is not None else scores
        out = scores.softmax(-1).to(query.dtype) @ value
        return (out, scores.logsumexp(-1)) if kwargs.get("return_lse") else out

    flex_attention.fused = fused  # type: ignore[attr-defined]
    import torch.nn.attention.flex_attention as flex

    yield flex, "flex_attention", flex_attention

    import torch.nested._internal.sdpa as ragged
    from torch.nn.attention import SDPBackend

    def kernel(query: Tensor, *_: Any) -> SDPBackend:
        """Of ragged sequences, on CUDA."""
        low = query.dtype in (torch.float16, torch.bfloat16)
        return SDPBackend.FLASH_ATTENTION if low else SDPBackend.EFFICIENT_ATTENTION

    yield ragged, "_select_sdp_backend", kernel


class _Inside(nn.Module):
    """A module in a wrapper that spreads it over devices."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> Any:
        return contextlib.nullcontext()


class _Done:
    """Work of a process group of one."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _distributed(tell: Tell) -> Iterator[tuple[Any, str, Any]]:
    if not dist.is_available() or dist.is_initialized():
        return

    class Spread(_Inside):
        def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            super().__init__(module)
            tell("wrappers that spread the model over devices are left out: what is traced is the module inside, on one device")

    def done(*args: Any, **kwargs: Any) -> Any:
        return _Done() if kwargs.get("async_op") else None

    started: list[bool] = []
    yield nn.parallel, "DistributedDataParallel", Spread
    yield nn.parallel.distributed, "DistributedDataParallel", Spread
    yield nn, "DataParallel", Spread
    yield nn.parallel, "DataParallel", Spread
    fsdp = sys.modules.get("torch.distributed.fsdp")  # to import it takes as long as a trace
    if fsdp is not None:
        yield fsdp, "FullyShardedDataParallel", Spread
        yield fsdp, "fully_shard", lambda module, *args, **kwargs: module
    yield dist, "init_process_group", lambda *args, **kwargs: started.append(True)
    yield dist, "is_initialized", lambda: bool(started)
    yield dist, "destroy_process_group", lambda *args: started.clear()
    yield dist, "get_backend", lambda *args: "gloo"
    yield dist, "get_rank", lambda *args: 0
    yield dist, "get_world_size", lambda *args: 1
    for name in ("barrier", "all_reduce", "broadcast", "reduce", "monitored_barrier"):
        yield dist, name, done

    def gather(outputs: list[Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        outputs[0].copy_(tensor)
        return done(**kwargs)

    yield dist, "all_gather", gather
    yield nn.SyncBatchNorm, "convert_sync_batchnorm", classmethod(lambda cls, module, *args: module)

"""One training or inference step on plain PyTorch, written once: traced on fake tensors, run on real ones.

The model is changed from outside only: hooks for casts, a wrapped `forward` for recompute.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin

from foretell.errors import ModelError
from foretell.trace.adapters.put import adapt
from foretell.trace.chunked.deferred import LossInChunks
from foretell.trace.fold.blocks import find_blocks
from foretell.trace.fold.recompute import Observer, SilentObserver, apply_recompute, plainly
from foretell.trace.load.output import entries_told, loss_in
from foretell.trace.moments.optimizer import CodedAdamW, tables
from foretell.trace.recipe import Adapters, Recipe
from foretell.trace.sandbox.blame import BATCH_REMEDY, at, defined, made_at, written

Batch: TypeAlias = Mapping[str, Any] | tuple[Any, ...] | Tensor
Loss: TypeAlias = Callable[[Any, Any], Tensor]
Losses: TypeAlias = Callable[[nn.Module, Any], Iterator[Tensor]]

_AUTOCAST = {"bf16-autocast": torch.bfloat16, "fp16-autocast": torch.float16}
_THROUGHOUT = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SHARDED = {"fsdp-bf16": torch.bfloat16, "fsdp-fp16": torch.float16}


@dataclass(frozen=True)
class Workload:
    """What the user brings: a module, an example batch and how to get a loss from its output."""

    model: nn.Module
    batch: Batch
    loss: Loss | None = None
    losses: Losses | None = None
    """Scalars of its layers one after another, each run backward before the next is computed, where there is no global
    backward: a generator of (model, batch). `loss` must be their sum, with the same gradients: plans run that."""
    around: Callable[[Workload], Tensor] | None = None
    """How the loss of this workload is computed instead, from the same one without this: where ranks share a batch."""

    def summed(self) -> Workload:
        """The same with one backward."""
        return replace(self, losses=None)


class _Scaler(torch.amp.GradScaler):
    """PyTorch's, which here takes fp16 gradients too: where ranks share parameters they stand for fp32 shards."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)


class Step:
    """A prepared step: `micro_batch()` any number of times, then `update()`; or `evaluate()`. `adapted`: see `put_adapters`."""

    def __init__(
        self, workload: Workload, recipe: Recipe, *, device_type: str, observer: Observer | None = None, adapted: bool = False
    ) -> None:
        if recipe.precision in _THROUGHOUT:
            workload = replace(workload, batch=cast_floats(workload.batch, _THROUGHOUT[recipe.precision]))
        if recipe.shards > 1:
            workload = workload.summed()
        if recipe.channels_last:
            workload = replace(workload, batch=torch.utils._pytree.tree_map(innermost, workload.batch))
            lay_channels_last(workload.model)
        if recipe.loss_chunks > 1 and recipe.mode == "train":
            workload = in_chunks(workload.summed(), recipe.loss_chunks)
        self.workload, self.recipe, self.device_type = workload, recipe, device_type
        self.observer: Observer = observer or SilentObserver()
        self.model = workload.model
        self.model.train(recipe.mode == "train")
        self.kernels: dict[str, int] = {}
        """Of foretell's own: how many modules have each."""
        if any(isinstance(one, UninitializedTensorMixin) for one in (*self.model.parameters(), *self.model.buffers())):
            with torch.no_grad():  # lazy modules learn their sizes from a first batch
                call_model(self.model, workload.batch)
        if not adapted:
            prepare_weights(self.model, recipe.precision, recipe.adapters, recipe.base)
        elif recipe.precision in _SHARDED:
            prepare_precision(self.model, recipe.precision)
        if recipe.kernels:
            from foretell.kernels.swap.apply import apply

            put = apply(self.model, recipe.kernels, emulated=True).swapped
            self.kernels = {name: sum(one.kernel == name for one in put) for name in recipe.kernels}
        for name, parameter in self.model.named_parameters():
            if recipe.mode == "infer" or any(name.startswith(prefix) for prefix in recipe.freeze):
                parameter.requires_grad_(False)
        if recipe.recompute != "none" and recipe.mode == "train":
            apply_recompute(self.model, recipe.recompute, self.observer)
        self.backwards = 0
        """Of one micro-batch: more than one where the workload has losses of its own."""
        self.scaler = _Scaler(device_type) if recipe.precision in ("fp16-autocast", "fsdp-fp16") else None

    def create_optimizer(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        chosen = list(parameters) if parameters is not None else [p for p in self.model.parameters() if p.requires_grad]
        if not chosen:
            raise ModelError(f"the model has no parameter to train{at(self._frozen_at())}", "unfreeze some, or use --infer")
        self.parameters = chosen
        self.optimizer = build_optimizer(self.recipe.optimizer, chosen, self.recipe.state_format, tables(self.model))
        if self.scaler is not None:
            self.scaler.scale(torch.zeros((), device=chosen[0].device))  # makes its state now, not inside the first step

    def _frozen_at(self) -> str:
        """Where the user's code freezes, as far as that can be seen; else where the model is defined."""
        return written(self._files(), "requires_grad") or defined(type(self.model))

    def _files(self) -> list[str]:
        """The user's files that the model's classes are from."""
        return list(dict.fromkeys(inspect.getsourcefile(type(one)) or "" for one in self.model.modules() if defined(type(one))))

    def micro_batch(self) -> None:
        self.backwards = 0
        with plainly():
            self._micro_batch()

    def _micro_batch(self) -> None:
        self.observer.phase("forward")
        for loss in each_loss(self.workload, self.autocast):
            if self.recipe.accumulate > 1:
                loss = loss / self.recipe.accumulate
            if self.scaler is not None:
                loss = self.scaler.scale(loss)
            if not loss.requires_grad:
                made_by = self.workload.loss or forward_of(self.model)
                raise ModelError(
                    f"the loss depends on no parameter that is trained: it has no gradient{at(defined(made_by))}",
                    "keep .detach(), .item() and torch.no_grad() out of the way from the parameters to the loss",
                )
            self.observer.phase("backward")
            loss.backward()
            self.backwards += 1
            self.observer.phase("forward")

    def update(self) -> None:
        self.observer.phase("update")
        if self.recipe.clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip)
        try:
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
        except RuntimeError as error:
            if "sparse gradients" in str(error):
                made_at(error, written(self._files(), "sparse=True"))
            raise

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self) -> None:
        self.observer.phase("forward")
        with torch.no_grad(), self.autocast():
            call_model(self.workload.model, self.workload.batch)

    def autocast(self) -> AbstractContextManager[Any]:
        if self.recipe.precision not in _AUTOCAST:
            return nullcontext()
        return torch.autocast(self.device_type, _AUTOCAST[self.recipe.precision])


def call_model(model: nn.Module, batch: Batch) -> Any:
    """Call the model with what of the batch its `forward` takes: entries by their names, or as many of a tuple as it has places."""
    forward = forward_of(model)
    args, kwargs = given(forward, batch)
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        refuse_arguments(forward, args, kwargs, error)
        raise


def given(forward: Callable[..., Any], batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for `forward` out of a batch; the rest of it is for the loss."""
    if isinstance(batch, Mapping):
        signature = inspect.signature(forward).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.values())
        if not takes_any and len(signature) == 1 and not signature.keys() & batch.keys():
            return (batch,), {}  # forward(self, batch)
        return (), {key: value for key, value in batch.items() if takes_any or key in signature}
    if isinstance(batch, tuple):
        return batch[: places(forward, len(batch))], {}
    return (batch,), {}


def forward_of(model: nn.Module) -> Callable[..., Any]:
    """What says which arguments a model takes: of a wrapper that passes on whatever it gets, the module inside."""
    forward: Callable[..., Any] = model.forward
    if not inspect.ismethod(forward):  # a method says it by itself, without `self`
        forward = getattr(forward, "__wrapped__", forward)
    inside = getattr(model, "module", None)
    if isinstance(inside, nn.Module):
        kinds = {p.kind for p in inspect.signature(forward).parameters.values()}
        if kinds <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
            return forward_of(inside)
    return forward


def places(function: Callable[..., Any], most: int) -> int:
    """How many arguments a function takes by their place, of so many."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return most
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return most
    placed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return min(most, sum(p.kind in placed for p in parameters))


def refuse_arguments(function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], error: TypeError) -> None:
    """Raise that a function does not take what it is given, where that is why it failed."""
    try:
        signature = inspect.signature(function)
        signature.bind(*args, **kwargs)
    except ValueError:
        return
    except TypeError as why:
        has = ", ".join(kwargs) if kwargs else f"{len(args)} in a tuple" if args else "nothing that it names"
        name = getattr(function, "__qualname__", "forward")
        raise ModelError(
            f"{name}{signature} cannot be called with the batch, which gives it {has}: {why}{at(defined(function))}", BATCH_REMEDY
        ) from error


def each_loss(workload: Workload, guard: Callable[[], AbstractContextManager[Any]]) -> Iterator[Tensor]:
    """Scalars to call backward on, each before the next is asked for: one, unless the workload has `losses`.

    They are computed under the guard and handed out without it."""

    def guarded(compute: Callable[[], Any]) -> Any:
        with guard():
            return compute()

    if workload.losses is None:
        yield guarded(lambda: compute_loss(workload))
        return
    waiting = workload.losses(workload.model, workload.batch)
    while (loss := guarded(lambda: next(waiting, None))) is not None:
        yield _scalar(loss, loss)


def compute_loss(workload: Workload) -> Tensor:
    """A scalar to call backward on: the user's loss, or the one in the output (`load.output`)."""
    if workload.around is not None:
        return workload.around(replace(workload, around=None))
    output = call_model(workload.model, workload.batch)
    if workload.loss is not None:
        return _scalar(call_loss(workload.loss, output, workload.batch), output, workload.loss)
    return _scalar(loss_in(workload.model, output), output, forward_of(workload.model))


def in_chunks(workload: Workload, chunks: int) -> Workload:
    """The same workload with its output layer and cross entropy computed over chunks of the tokens."""
    how = LossInChunks(workload.model, chunks)

    def around(plain: Workload) -> Tensor:
        with how.deferring():
            return compute_loss(plain)

    return replace(workload, around=around)


def call_loss(loss: Callable[..., Any], output: Any, batch: Batch) -> Any:
    """The loss of an output and the batch; some want the output alone."""
    args = (output, batch)[: places(loss, 2)]
    try:
        return loss(*args)
    except TypeError as error:
        refuse_arguments(loss, args, {}, error)
        raise


def _scalar(loss: Any, output: Any, made_by: Callable[..., Any] | None = None) -> Tensor:
    if isinstance(loss, Tensor) and loss.dim() != 0 and loss.numel() == 1:
        loss = loss.squeeze()
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    where = at(defined(made_by)) if made_by is not None else ""  # read from source: milliseconds
    if isinstance(loss, Tensor):
        raise ModelError(
            f"no scalar loss to train on: it is a tensor of shape {tuple(loss.shape)}{where}", "take its .mean() or .sum()"
        )
    found = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"{type(output).__name__}{entries_told(output)}"
    if loss is not None:
        found = f"{found}, and the loss {type(loss).__name__}"
    raise ModelError(
        f"no scalar loss to train on: the model returned {found}{where}",
        "define loss(output, batch) beside the model, or return one scalar that gradients reach",
    )


def prepare_weights(model: nn.Module, precision: str, adapters: Adapters | None = None, base: Iterable[tuple[str, str]] = ()) -> None:
    """Cast a model as its precision says and put adapters on it. These stay fp32, but where shards are cast as they are gathered."""
    if adapters is not None and precision in _SHARDED:
        adapt(model, adapters, base)
    prepare_precision(model, precision)
    if adapters is not None and precision not in _SHARDED:
        adapt(model, adapters, base)


def put_adapters(model: nn.Module, recipe: Recipe) -> None:
    """A recipe's adapters on a model whose step is prepared later, with `adapted`: shards are cast as they are gathered, then."""
    prepare_weights(model, recipe.precision if recipe.precision in _THROUGHOUT else "fp32", recipe.adapters, recipe.base)


def prepare_precision(model: nn.Module, precision: str) -> None:
    if precision in _THROUGHOUT:
        _cast_tensors(model, _THROUGHOUT[precision], buffers=True)
    elif precision in _SHARDED:
        _cast_tensors(model, _SHARDED[precision], buffers=False)
        _cast_inputs(model, _SHARDED[precision])


def _cast_tensors(model: nn.Module, dtype: torch.dtype, *, buffers: bool) -> None:
    """What `model.to(dtype)` does, by replacing tensors: fake parameters cannot be changed in place."""
    done: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                if parameter not in done:
                    done[parameter] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                module._parameters[name] = done[parameter]
        for name, buffer in module._buffers.items():
            if buffers and buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def _cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Float inputs of the root and of every block are cast, as FSDP2's mixed precision does."""

    def pre_hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_floats((args, kwargs), dtype)

    for path in ["", *find_blocks(model)]:
        model.get_submodule(path).register_forward_pre_hook(pre_hook, with_kwargs=True)


def lay_channels_last(model: nn.Module) -> None:
    """What `model.to(memory_format=torch.channels_last)` does, by replacing tensors."""
    done: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() == 4:
                if parameter not in done:
                    done[parameter] = nn.Parameter(innermost(parameter.detach()), parameter.requires_grad)
                module._parameters[name] = done[parameter]


def innermost(value: Any) -> Any:
    """An image, or a weight for images, with its channels innermost; all else as it is."""
    return value.contiguous(memory_format=torch.channels_last) if isinstance(value, Tensor) and value.dim() == 4 else value


def cast_floats(values: Any, dtype: torch.dtype) -> Any:
    """The same structure with its float tensors in another dtype."""
    return torch.utils._pytree.tree_map(
        lambda value: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value, values
    )


def build_optimizer(name: str, parameters: list[Any], state_format: str = "fp32", whole: Collection[Tensor] = ()) -> torch.optim.Optimizer:
    """The optimizer a recipe names; without a suffix, PyTorch's own default for CUDA. Codes of moments are not for `whole`."""
    kind, _, variant = name.partition("-")
    if state_format != "fp32":
        return CodedAdamW(parameters, state_format, whole, decoupled=kind == "adamw")
    flags: dict[str, bool | None] = {
        "": {}, "fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False, "fused": False},
    }[variant]  # type: ignore[assignment]  # fmt: skip
    if flags.get("fused") and any(isinstance(one, Tensor) and one.is_complex() for one in parameters):
        flags = {}  # fused ones take no complex numbers
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, **flags)
    if kind == "momentum":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, **flags)
    made = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    return made(parameters, lr=1e-4, **flags)

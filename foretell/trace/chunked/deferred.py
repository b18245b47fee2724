"""A model's logits that are not computed until a cross entropy asks for them, and then chunk by chunk.

While the loss is computed, products of linear layers outside the blocks give `DeferredLogits` in place of a tensor. Views that
leave the last dimension alone, casts and factors are noted; `F.cross_entropy` computes in chunks; whatever else reads them
gets the tensor, computed as ever. A loss that does not come to chunks in this way is refused: the plan said that it does.
The model's code and its modules stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from foretell.errors import ModelError
from foretell.trace.adapters.functions import autocast_dtype
from foretell.trace.chunked.loss import Change, ChunkedCrossEntropy, LossOfChunks
from foretell.trace.fold.blocks import find_blocks

_LINEAR = F.linear
_REMEDY = "leave loss_chunks (--loss-chunks) out for this model"


class LossInChunks:
    """What computes a model's loss over so many chunks."""

    def __init__(self, model: nn.Module, chunks: int) -> None:
        self.model, self.chunks = model, chunks
        self.inside = 0
        """Blocks at work."""
        self.done: list[Tensor] = []
        """Weights of the output layers whose loss was computed."""
        self.computed: list[tuple[str, Tensor]] = []
        """What asked for outputs of a layer as a tensor, and the layer's weight."""
        for path in find_blocks(model):
            block = model.get_submodule(path)
            block.register_forward_pre_hook(self._enter)
            block.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_: Any) -> None:
        self.inside += 1

    def _leave(self, *_: Any) -> None:
        self.inside -= 1

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Around the call of the model and of its loss."""
        self.inside = 0
        self.done, self.computed = [], []
        try:
            with _Deferring(self):
                yield
            self._refuse_whole()
        finally:
            self.done, self.computed = [], []

    def _refuse_whole(self) -> None:
        """Raise where logits were computed whole."""
        if not self.done:
            names = ", ".join(dict.fromkeys(name for name, _ in self.computed))
            read = f": {names} read them first" if names else ""
            raise ModelError(f"the loss of {type(self.model).__name__} is no cross entropy of a linear layer's outputs{read}", _REMEDY)
        twice = next((name for name, weight in self.computed if any(weight is one for one in self.done)), None)
        if twice is not None:
            raise ModelError(f"the loss cannot be computed in chunks: {twice} reads its logits besides", _REMEDY)

    def loss(self, logits: DeferredLogits, target: Tensor, **how: Any) -> Tensor:
        """The cross entropy of logits that were not computed."""
        why = _not_chunked(logits, target, **how)
        if why:
            raise ModelError(f"the loss cannot be computed in chunks: {why}", _REMEDY)
        self.done.append(logits.weight)
        what = LossOfChunks(
            self.chunks, logits.dtype_of_product, logits.changes, how["reduction"] == "mean", how["ignore_index"], how["label_smoothing"],
            torch.is_grad_enabled(),
        )  # fmt: skip
        rows = logits.hidden.reshape(-1, logits.hidden.shape[-1])
        with torch._C.DisableTorchFunction():
            return ChunkedCrossEntropy.apply(rows, logits.weight, logits.bias, target, what)  # type: ignore[no-any-return, no-untyped-call]


def _not_chunked(
    logits: DeferredLogits, target: Tensor, *, weight: Any = None, reduction: str, ignore_index: int, label_smoothing: float
) -> str:
    if weight is not None:
        return "its classes have weights"
    if target.is_floating_point():
        return "its targets are probabilities"
    if reduction not in ("mean", "sum"):
        return f"its reduction is {reduction}"
    if logits.dim() != 2 or target.dim() != 1:
        return "its logits are not rows of classes"
    return ""


class _Deferring(TorchFunctionMode):
    def __init__(self, owner: LossInChunks) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _LINEAR and not self.owner.inside and not kwargs and args[0].dim() > 1:
            hidden, weight, bias = (*args, None)[:3]
            hidden = _tensors(hidden, "linear")
            return DeferredLogits(self.owner, hidden, weight, bias, autocast_dtype(hidden) or hidden.dtype)
        return func(*args, **(kwargs or {}))


def aside(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that sees nothing of deferred logits: the compiler does not look through what defers them."""

    @functools.wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return forward(*args, **kwargs)

    return called


class DeferredLogits:
    """hidden Wᵀ + bias, as far as its reader can tell."""

    def __init__(self, owner: LossInChunks, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.owner, self.weight, self.bias = owner, weight, bias
        self.dtype_of_product = dtype
        self.changes: tuple[Change, ...] = ()
        self._hidden, self._version = hidden, hidden._version
        self.tensor: Tensor | None = None

    @property
    def hidden(self) -> Tensor:
        """As it was when the layer was called."""
        if self._hidden._version != self._version:
            raise ModelError("what the output layer reads is changed in place before its outputs are computed", _REMEDY)
        return self._hidden

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy and args and isinstance(args[0], cls):
            return _cross_entropy(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        return func(*_tensors(args, name), **_tensors(kwargs, name))

    # ------------------------------------------------------------ what needs no values

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        return next((value for kind, value in reversed(self.changes) if kind == "to"), self.dtype_of_product)

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def ndim(self) -> int:
        return self.hidden.dim()

    @property
    def requires_grad(self) -> bool:
        return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (self.hidden, self.weight, self.bias))

    def dim(self) -> int:
        return self.hidden.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def is_floating_point(self) -> bool:
        return True

    def _seen(self, hidden: Tensor) -> DeferredLogits:
        found = DeferredLogits(self.owner, hidden, self.weight, self.bias, self.dtype_of_product)
        found.changes = self.changes
        return found

    def _changed(self, kind: str, value: Any) -> DeferredLogits:
        found = self._seen(self.hidden)
        found.changes = (*self.changes, (kind, value))
        return found

    # ------------------------------------------------------------ views and factors

    def contiguous(self) -> DeferredLogits:
        return self

    def view(self, *shape: Any) -> Any:
        return self.reshape(*shape)

    def reshape(self, *shape: Any) -> Any:
        wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
        if wanted and wanted[-1] in (self.shape[-1], -1) and isinstance(wanted[0], int) and wanted.count(-1) <= 1:
            lead = wanted[:-1]
            left = self.hidden.numel() // self.hidden.shape[-1]
            if wanted[-1] == -1 and torch.Size(lead).numel() != left:
                return self.computed("reshape").reshape(*shape)
            return self._seen(self.hidden.reshape(*lead, self.hidden.shape[-1]))
        return self.computed("reshape").reshape(*shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        last = end_dim % self.ndim
        if last == self.ndim - 1 and start_dim % self.ndim != last:
            return self.computed("flatten").flatten(start_dim, end_dim)
        return self._seen(self.hidden.flatten(start_dim, last))

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        plain = all(isinstance(part, int | slice) or part is Ellipsis for part in parts)
        if Ellipsis in parts if plain else False:
            whole = parts[-1] == slice(None) or parts[-1] is Ellipsis
        else:
            whole = plain and len(parts) < self.ndim
        return self._seen(self.hidden[index]) if plain and whole else self.computed("indexing")[index]

    def float(self) -> DeferredLogits:
        return self.to(torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            (wanted,) = args
            if isinstance(wanted, torch.dtype):
                return self if wanted == self.dtype else self._changed("to", wanted)
            if torch.device(wanted) == self.device if isinstance(wanted, str | torch.device) else False:
                return self
        if not args and kwargs.keys() == {"dtype"}:
            return self.to(kwargs["dtype"])
        return self.computed("to").to(*args, **kwargs)

    def __mul__(self, other: Any) -> Any:
        return self._changed("mul", other) if isinstance(other, int | float) else self.computed("mul") * other

    def __rmul__(self, other: Any) -> Any:
        return self * other

    def __truediv__(self, other: Any) -> Any:
        return self._changed("div", other) if isinstance(other, int | float) else self.computed("div") / other

    # ------------------------------------------------------------ everything else

    def computed(self, asked_by: str) -> Tensor:
        """The tensor, whose values are wanted after all."""
        if self.tensor is None:
            self.owner.computed.append((asked_by, self.weight))
            with torch._C.DisableTorchFunction():
                found = F.linear(self.hidden, self.weight, self.bias)
                for kind, value in self.changes:
                    found = found.to(value) if kind == "to" else found * value if kind == "mul" else found / value
            self.tensor = found
        return self.tensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.computed(name), name)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))


def _operator(name: str) -> Callable[..., Any]:
    def run(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self.computed(name.strip("_")), name)(*_tensors(args, name))

    return run


for _name in ("add", "radd", "sub", "rsub", "rtruediv", "matmul", "rmatmul", "pow", "neg", "eq", "ne", "lt", "le", "gt", "ge", "setitem", "bool"):
    setattr(DeferredLogits, f"__{_name}__", _operator(f"__{_name}__"))
DeferredLogits.__hash__ = object.__hash__  # type: ignore[method-assign]


def _tensors(values: Any, asked_by: str) -> Any:
    """The same with tensors in place of logits that were not computed."""
    if isinstance(values, DeferredLogits):
        return values.computed(asked_by)
    if isinstance(values, list | tuple):
        return type(values)(_tensors(value, asked_by) for value in values)
    if isinstance(values, dict):
        return {name: _tensors(value, asked_by) for name, value in values.items()}
    return values


def _cross_entropy(
    logits: DeferredLogits, target: Tensor, weight: Any = None, size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    if size_average is not None or reduce is not None:
        reduction = "size_average"
    return logits.owner.loss(
        logits, target, weight=weight, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing
    )


def _flat(logits: DeferredLogits) -> tuple[Iterable[Tensor], Callable[[Tensor], DeferredLogits]]:
    """What hooks on a model's outputs see of them: the gradient of the model begins with that of `hidden`."""
    return [logits.hidden], logits._seen


def _again(hidden: Iterable[Tensor], seen: Callable[[Tensor], DeferredLogits]) -> DeferredLogits:
    (found,) = hidden
    return seen(found)


pytree.register_pytree_node(DeferredLogits, _flat, _again)

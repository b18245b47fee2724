"""Code that reads what is in a tensor, or makes tensors whose size depends on it, while nothing is in them.

Where a value is known (`trace.record.values`) it is that. Where it is not: a hint if one was given, what a healthy run goes on
with (`trace.record.branches`), an ordinary answer. What was not known is written down among the assumptions.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils.weak import WeakIdKeyDictionary

from foretell.trace.doubts import EVENLY, ONE_DRAW
from foretell.trace.record.branches import asked, asker, short
from foretell.trace.record.fake_cache import QuickFakes
from foretell.trace.record.sized import SPECIAL
from foretell.trace.record.values import (
    ALL_ONE,
    ASSUMED,
    DRAWN,
    FOLLOWED,
    Value,
    about,
    attach,
    flat,
    is_small,
    known,
    run,
    value_of,
)

_KINDS = ("_unique2", "unique_consecutive", "unique_dim", "unique_dim_consecutive")
FakeTensorDeviceMismatchError = getattr(fake_tensor, "FakeTensorDeviceMismatchError", fake_tensor.UnsupportedFakeTensorException)
_aten = torch.ops.aten
_CPU = torch.device("cpu")
_ITEM = _aten._local_scalar_dense.default
_WHOLE_ITEM = _aten.item.default
"""What it is in inference mode."""
ORDINARY = {
    "aten.all.default": True, "aten.any.default": False, "aten.sum.default ==": True, "aten._is_all_true.default": True,
    "aten._is_any_true.default": False,
}  # fmt: skip
"""Questions about a whole tensor, answered as ordinary data would: no padding, no NaN, a mask that masks nothing."""
_TRUE = {"_is_all_true": True, "_is_any_true": False, "equal": True, "allclose": True, "is_nonzero": False}
_PACK = _aten._pack_padded_sequence.default
_COALESCE = _aten._coalesce.default
"""Its shape rule finds no element at all."""
PATIENCE = 64
"""Times that a line gets the same answer in one call of a module."""
WRAPPERS = (NestedTensor,)
"""Tensors made of others, which take their ops apart themselves."""
_FOREIGN = ("Please convert all Tensors to FakeTensors", "Mixing fake modes")


class ReadingMode(QuickFakes):
    """A fake tensor mode that has an answer whenever code wants to know what is in a tensor."""

    def __init__(self, hints: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self.hints = dict(hints or {})
        self.assumed: set[str] = set()
        self.ordinary_number = 1.0
        """What a number is taken to be that nothing is known of."""
        self.patient = True
        """While the model is built, a question without an answer is an error: it is then built another way."""
        self.before_packing: Callable[[], None] = lambda: None
        self._phase = ""
        self._depth = 0
        self._rows: list[Any] | None = None
        self._names: dict[Any, str] = {}
        self._looked: Counter[Any] = Counter()
        self.read_numbers = False
        self._calls: list[int] = []
        self._numbers = itertools.count(1)
        self._taken_in = WeakIdKeyDictionary()

    def __deepcopy__(self, memo: Any) -> ReadingMode:
        """Layers that are copied (`nn.TransformerEncoder` copies its own) stay under this mode: fake tensors know theirs."""
        return self

    def create_symbolic_nested_int(self, *, nt_tensor_id: int | None = None) -> Any:
        """The length of a ragged dimension, which is a symbol; there are none else here."""
        if self.shape_env is None:  # type: ignore[has-type]
            from torch.fx.experimental.symbolic_shapes import ShapeEnv

            self.shape_env: Any = ShapeEnv()
        return super().create_symbolic_nested_int(nt_tensor_id=nt_tensor_id)

    def _here(self) -> str:
        raise NotImplementedError

    def _name(self, func: Any) -> str:
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = str(func)
        return name

    def where(self, func: Any) -> str:
        return f"{self._name(func)} in module '{self._here()}'"

    @contextmanager
    def muted(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    # ------------------------------------------------------------------ ops

    def answered(self, func: Any, kinds: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What the op gives on fake tensors, also where that depends on what is in them. To be called muted."""
        try:
            if func is _COALESCE:
                return self._coalesced(func, args[0])
            if func is _ITEM and self.shape_env is not None:
                return self._item(func, args[0])
            output = self.dispatch(func, kinds, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._by_values(func, args, kwargs)
        except (UnsupportedOperatorException, NotImplementedError):
            found = self._really(func, args, kwargs)
            if found is None:
                raise
            return found[0]
        except FakeTensorDeviceMismatchError:
            strange = [one for one in flat((args, kwargs)) if isinstance(one, FakeTensor) and one.fake_device.type == "meta"]
            if not strange:
                raise
            for tensor in strange:  # made by PyTorch's own code, which looks past the device that a fake tensor shows
                tensor.fake_device = _CPU
            return self.dispatch(func, kinds, args, kwargs)
        except AssertionError as error:
            if not any(said in str(error) for said in _FOREIGN):
                raise
            return self.answered(func, kinds, self._ours(args), self._ours(kwargs))
        if type(output) is FakeTensor and output.layout is torch.sparse_coo and output._nnz() == 0:
            return self._as_full(args, output)
        if func is _aten.lift_fresh.default and not isinstance(args[0], FakeTensor) and is_small(args[0]):
            with no_dispatch():
                attach(output, args[0].clone())
        return output

    def _as_full(self, args: Any, output: Tensor) -> Tensor:
        """Shape rules make sparse tensors without elements: they have as many as the first that they are made of."""
        source = next((one for one in flat(args) if one.layout is torch.sparse_coo and one._nnz()), None)
        if source is None or source.dense_dim() != output.dense_dim():
            return output
        with self:
            return self._sparse(output, source._nnz(), output.is_coalesced())

    def _coalesced(self, func: Any, source: Tensor) -> Tensor:
        with self:
            count, twin = source._nnz(), known(source._indices())
            if twin is not None:
                with no_dispatch():
                    count = torch.unique(twin, dim=1).shape[1]
            else:
                self.assume(f"{self.where(func)} is taken to find no place twice")
            return self._sparse(source, count, True)

    def _sparse(self, like: Tensor, count: int, coalesced: bool) -> Tensor:
        indices, numbers = like._indices(), like._values()
        parts = indices.new_empty((indices.shape[0], count)), numbers.new_empty((count, *numbers.shape[1:]))
        return _aten._sparse_coo_tensor_with_dims_and_tensors.default(  # type: ignore[no-any-return]
            like.sparse_dim(), like.dense_dim(), list(like.shape), *parts, dtype=like.dtype, layout=torch.sparse_coo, device=_CPU,
            is_coalesced=coalesced,
        )  # fmt: skip

    def _ours(self, values: Any) -> Any:
        """Tensors that were made elsewhere, real ones and those of another trace, as this mode's own."""
        if isinstance(values, Tensor):
            return values if isinstance(values, FakeTensor) and values.fake_mode is self else self.taken_in(values)
        if type(values) in (list, tuple):
            return type(values)(self._ours(value) for value in values)
        if isinstance(values, dict):
            return {key: self._ours(value) for key, value in values.items()}
        return values

    def taken_in(self, tensor: Tensor) -> Tensor:
        made: Tensor | None = self._taken_in.get(tensor)
        if made is None:
            with self.muted(), self:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            if isinstance(tensor, FakeTensor):
                value = value_of(tensor)
                if value is not None:
                    made.untyped_storage().__dict__["value"] = value
            elif is_small(tensor) and tensor.device.type == "cpu":
                with no_dispatch():
                    attach(made, tensor.detach().clone())
            if isinstance(tensor, nn.Parameter) or getattr(tensor, "_is_param", False):
                made = nn.Parameter(made, tensor.requires_grad)
            self._taken_in[tensor] = made
        return made

    def _really(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Value | None] | None:
        """The op on values, as fake tensors that have them; None where it has an input that is not known."""
        used: list[Value] = []
        try:
            made = run(func, args, kwargs, used)
        except LookupError:
            return None
        worst = max(used, key=lambda value: value.kind, default=None)
        return self._faked(made, worst), worst

    def _faked(self, made: Any, worst: Value | None) -> Any:
        if isinstance(made, Tensor):
            with self:
                fake = torch.empty_strided(made.shape, made.stride(), dtype=made.dtype)
            if is_small(made):
                attach(fake, made, *((worst.kind, worst.words) if worst is not None else ()))
            return fake
        if isinstance(made, (tuple, list)):
            return type(made)(self._faked(one, worst) for one in made)
        return made

    @staticmethod
    def _is_guess(value: Value | None) -> bool:
        """Whether it rests on masks that are taken to be true everywhere: their opposite would let nothing pass, and a step
        that does nothing is not the one to plan for."""
        return value is not None and value.kind == ASSUMED and not value.words.endswith(EVENLY)

    def _is_nothing(self, made: Any, value: Value | None) -> bool:
        return self._is_guess(value) and any(one.numel() == 0 for one in flat(made))

    def _note(self, value: Value | None) -> None:
        if value is not None and value.kind != FOLLOWED and value.words:
            words = value.words if value.kind == ASSUMED else f"what {value.words} draws {ONE_DRAW}"
            self.assumed.add(words)

    # ------------------------------------------------------------------ what depends on data

    def _by_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in (_ITEM, _WHOLE_ITEM):
            return self._item(func, args[0])
        if func is _PACK:
            self.before_packing()
        hint = self._hint(self._name(func), self._here())
        if hint is None:
            found = self._really(func, args, kwargs)
            if found is not None and not self._is_nothing(found[0], found[1]) and not _says_nothing(func, found[1]):
                self._note(found[1])
                return found[0]
        if self._rows is None and self.patient and not _has_known_masks(func, args):
            raise DataDependentOutputException(func)
        special = SPECIAL.get(about(func).name)
        if special is not None:
            return special(self, func, args, kwargs, hint)
        name = about(func).name
        if name in _TRUE:
            return self._truth(func, _TRUE[name])
        raise DataDependentOutputException(func)

    def _item(self, func: Any, source: Tensor) -> Any:
        if self._phase == "update" and source.dtype is not torch.bool:
            return 0.0  # a gradient scaler asking whether anything overflowed
        name, module = self._name(func), self._here()
        hint = self._hint(name, module)
        if hint is not None and source.dtype is not torch.bool:
            return hint if source.is_floating_point() else int(hint)
        value = value_of(source)
        if value is not None and (value.kind == FOLLOWED or (value.kind == DRAWN and self._turn() <= PATIENCE)):
            self._note(value)
            return known(source).item()  # type: ignore[union-attr]
        if value is None and self._rows is None and self.patient:
            raise DataDependentOutputException(func)
        if source.dtype is torch.bool:
            return self._truth(func, None if value is None else bool(known(source)), value, source)
        if value is not None:
            self._note(value)
            return known(source).item()  # type: ignore[union-attr]
        return self._number(source)

    def _number(self, source: Tensor) -> float | int:
        condition, turn = asked(sys._getframe(1)), self._turn()
        if (condition is not None and condition.loops and turn > 1) or turn > PATIENCE:
            other = (0.0, 1e6, 1.0)[turn % 3]
            return other if source.is_floating_point() else int(other)
        answer: float | int = self.ordinary_number if source.is_floating_point() else 1
        self.read_numbers = True
        self.assume(f"the number that {self._asker()} reads is taken to be {answer}")
        return answer

    def _turn(self) -> int:
        """How often this line has asked in this call of a module."""
        frame = asker(sys._getframe(1))
        key = (self._calls[-1] if self._calls else 0, frame and frame.f_code, frame and frame.f_lineno)
        self._looked[key] += 1
        return self._looked[key]

    def _truth(self, func: Any, otherwise: bool | None, value: Value | None = None, source: Tensor | None = None) -> bool:
        """A truth value that code asks for: what a healthy run goes on with, or an ordinary answer."""
        ordinary = self._ordinary(source) if value is None and source is not None else None
        if ordinary is not None:
            return ordinary
        condition, turn = asked(sys._getframe(1)), self._turn()
        if condition is not None and condition.answer is not None:
            answer = condition.answer
            if not (condition.guards or condition.counted) and turn > (1 if condition.loops else PATIENCE):
                return not answer
            self.assume(f"the condition at {condition.where} is taken to be {answer}")
            return answer
        if turn > PATIENCE:
            return not otherwise
        if value is not None and otherwise is not None:
            self._note(value)
            return otherwise
        answer = bool(otherwise)
        self.assume(f"what {self._asker()} asks is taken to be {answer}")
        return answer

    def _ordinary(self, source: Tensor) -> bool | None:
        """The answer of ordinary data (no padding, no NaN) to a question about a whole tensor, or None."""
        return None

    def assume(self, words: str) -> None:
        self.assumed.add(words)

    def _asker(self) -> str:
        """The line that wants to know, as `model.py:12`."""
        frame = asker(sys._getframe(1))
        return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else self._here() or "the model"

    def _hint(self, name: str, module: str) -> float | None:
        for pattern, value in self.hints.items():
            if fnmatchcase(name, pattern) or fnmatchcase(module, pattern) or fnmatchcase(f"{name}@{module}", pattern):
                return value
        return None

    def share(self, func: Any, mask: Tensor, hint: float | None) -> int:
        """How many elements of a mask pass."""
        value = value_of(mask)
        if hint is None and value is not None:
            with no_dispatch():
                count = int(torch.count_nonzero(known(mask)))  # type: ignore[arg-type]
            if count or not self._is_guess(value):
                self._note(value)
                return count
        if hint is None:
            self.assume(f"{self.where(func)} is taken to let everything pass; --hint '{self._name(func)}=0.5' says half of it")
            hint = 1.0
        return max(1, round(mask.numel() * hint)) if mask.numel() else 0

    # ------------------------------------------------------------------ what Python wants as its own

    @contextmanager
    def reads(self) -> Iterator[None]:
        """`tolist()` and `numpy()` of fake tensors, until the end of the block."""

        def numbers(tensor: Any) -> Tensor:
            value = value_of(tensor) if tensor.layout is torch.strided else None
            if value is None:
                self.assume(f"the numbers that {self._asker()} reads are taken to be 1")
                with no_dispatch():
                    return torch.ones(tensor.shape, dtype=tensor.dtype)
            self._note(value)
            with no_dispatch():
                return known(tensor).clone()  # type: ignore[union-attr]

        def to_list(tensor: Any) -> Any:
            if value_of(tensor) is None and self._rows is None and self.patient:
                raise DataDependentOutputException(_ITEM)
            with no_dispatch():
                return torch.Tensor.tolist(numbers(tensor))

        def to_numpy(tensor: Any, *, force: bool = False) -> Any:
            if value_of(tensor) is None and self._rows is None and self.patient:
                raise DataDependentOutputException(_ITEM)
            if tensor.requires_grad and not force:
                raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
            with no_dispatch():
                return numbers(tensor).numpy()

        def from_data(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
            """`torch.tensor` of a list with tensors in it reads them, past every mode."""

            def read(data: Any) -> Any:
                if isinstance(data, (list, tuple)):
                    return [one.tolist() if isinstance(one, Tensor) else read(one) for one in data]
                return data

            def made(data: Any, *args: Any, **kwargs: Any) -> Tensor:
                return make(read(data) if isinstance(data, (list, tuple)) else data, *args, **kwargs)

            return made

        def to_text(tensor: Any, how: str) -> str:
            return format(tensor.item(), how) if tensor.dim() == 0 else object.__format__(tensor, how)

        with ExitStack() as stack:
            for owner, name, ours in (
                (FakeTensor, "__format__", to_text),
                (FakeTensor, "tolist", to_list), (FakeTensor, "numpy", to_numpy), (torch, "tensor", from_data(torch.tensor)),
                (torch, "as_tensor", from_data(torch.as_tensor)),
            ):  # fmt: skip
                stack.enter_context(mock.patch.object(owner, name, ours, create=True))
            yield


def _says_nothing(func: Any, value: Value | None) -> bool:
    """Whether kinds are counted among numbers that are all taken to be one and the same."""
    return value is not None and value.words.endswith(ALL_ONE) and about(func).name in _KINDS


def _has_known_masks(func: Any, args: Any) -> bool:
    masks = [tensor for tensor in flat(args) if tensor.dtype in (torch.bool, torch.uint8)]
    return bool(masks) and all(value_of(mask) is not None for mask in masks)

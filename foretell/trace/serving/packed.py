"""A causal decoder on tokens of several sequences at once. The model stays as it is: its attention is taken over from outside.

    tokens    │ a a a │ b │ c │          one row of the batch, whatever sequences they are of
    positions │ 4 5 6 │ 9 │ 0 │          where each is in its own
    keep          │ 2   3   4 │          rows whose logits are wanted

Two doors: a model of transformers has an interface for attention, to which one more is added by name; any other module takes
`positions` in its forward (and `keep`, if it can) and calls `F.scaled_dot_product_attention` with `is_causal=True`.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from foretell.errors import ModelError

NAME = "foretell_packed"
REMEDY = (
    "a decoder of transformers that takes an attention implementation by name, or a module whose forward takes `positions` and "
    "calls F.scaled_dot_product_attention with is_causal=True"
)


IN_TURN = -1
"""As a layer's number: the one after the last that was called. Compiled code that all layers share knows no other."""


class How(NamedTuple):
    """What an attention asks for besides queries, keys and values."""

    layer: int
    scale: float
    window: int | None = None
    """Tokens that a query sees at most, itself included."""
    cap: float | None = None
    """Scores are held below it by a tanh."""


class Attend(Protocol):
    """The attention of one layer, all of (tokens, heads, size)."""

    def __call__(self, how: How, query: Tensor, key: Tensor, value: Tensor, /) -> Tensor: ...


_attending: list[Attend] = []
"""Whose turn it is; the last."""
_own: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""What a model that is taken over called its attention by."""


def _by_name(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, scaling: float | None = None,
    dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """As transformers calls attention that it knows by name: (1, heads, tokens, size) in, (1, tokens, heads, size) out."""
    if not _attending:
        raise ModelError("a model that an engine holds was called", "close the engine first: its attention is the model's own again then")
    strange = sorted(name for name in ("s_aux", "position_bias", "alibi") if more.get(name) is not None)
    if strange or mask is not None or not getattr(module, "is_causal", True):
        why = f"with {', '.join(strange)}" if strange else "with a mask of its own" if mask is not None else "that is not causal"
        raise ModelError(f"{type(module).__name__} has attention {why}, which no pages are kept for", REMEDY)
    layer = IN_TURN if torch.compiler.is_compiling() else int(module.layer_idx)  # type: ignore[arg-type]
    how = How(layer, scaling if scaling is not None else query.shape[-1] ** -0.5, sliding_window, softcap)
    found = _attending[-1](how, *(one[0].transpose(0, 1) for one in (query, key, value)))
    return found[None], None


class _Causal(TorchFunctionMode):
    """Takes the place of causal attention; layers are counted in the order they call."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend, self.layer = attend, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        layer = IN_TURN
        if not torch.compiler.is_compiling():
            layer, self.layer = self.layer, self.layer + 1
        return _by_function(self.attend, layer, *args, **(kwargs or {}))


def _by_function(
    attend: Attend, layer: int, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """As `F.scaled_dot_product_attention` is called."""
    if attn_mask is not None or not is_causal:
        raise ModelError("the model calls attention that is not causal, or has a mask of its own", REMEDY)
    if query.dim() != 4 or query.shape[0] != 1:
        raise ModelError(f"the model calls attention with queries of shape {tuple(query.shape)}", "(batch, heads, tokens, size)")
    how = How(layer, scale if scale is not None else query.shape[-1] ** -0.5)
    found = attend(how, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    return found[None].transpose(1, 2)  # which the model turns back to what it was: one row after another


class Packed:
    """A decoder behind one of the doors."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        taken = inspect.signature(model.forward).parameters
        self.named = hasattr(model, "set_attn_implementation") and "position_ids" in taken
        self.keeps = "logits_to_keep" in taken if self.named else "keep" in taken
        if self.named:
            self._refuse_strange(model.config)
            _register()
        elif "positions" not in taken:
            raise ModelError(f"{type(model).__name__} says no positions of its tokens: {', '.join(taken) or 'nothing'} in its forward", REMEDY)

    @staticmethod
    def _refuse_strange(config: Any) -> None:
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if getattr(config, "is_encoder_decoder", False):
            raise ModelError(f"{config.model_type} has an encoder, and only decoders are served", REMEDY)
        if kinds:
            raise ModelError(f"{config.model_type} has layers of {', '.join(sorted(kinds))}, whose state no pages are kept for", REMEDY)

    def __call__(self, tokens: Tensor, positions: Tensor, keep: Tensor, attend: Attend) -> Tensor:
        """Logits of the rows to keep: (rows, words)."""
        with torch.no_grad():
            if self.named:
                self._take_over()
                more = {"logits_to_keep": keep} if self.keeps else {}
                _attending.append(attend)
                try:
                    output = self.model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **more)
                finally:
                    _attending.pop()
                logits = output.logits if hasattr(output, "logits") else output[0]
            else:
                with _Causal(attend):
                    more = {"keep": keep} if self.keeps else {}
                    logits = self.model(tokens[None], positions=positions[None], **more)
        return logits[0] if self.keeps else logits[0].index_select(0, keep)

    def _take_over(self) -> None:
        own = self.model.config._attn_implementation
        if own != NAME:  # each time: another engine of the same model may have released it
            _own[self.model] = own
            self.model.set_attn_implementation(NAME)  # type: ignore[operator]

    def release(self) -> None:
        """The model calls its own attention again, until the next step."""
        if self.named and self.model.config._attn_implementation == NAME:
            self.model.set_attn_implementation(_own[self.model])  # type: ignore[operator]


def _register() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():  # and among the masks it is not: none is made then, nor positions looked at
        ALL_ATTENTION_FUNCTIONS.register(NAME, _by_name)


class Cached(NamedTuple):
    """What one layer keeps of a token."""

    heads: int
    key: int
    """Elements of each head."""
    value: int
    window: int | None


def layers_of(packed: Packed, device: torch.device | str) -> list[Cached]:
    """What the layers keep, as one forward of two tokens tells."""
    found: dict[int, Cached] = {}

    def attend(how: How, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found[how.layer] = Cached(key.shape[1], key.shape[2], value.shape[2], how.window)
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])

    two = torch.arange(2, device=device)
    packed(two, two, two[1:], attend)
    if not found or sorted(found) != list(range(len(found))):
        raise ModelError(f"{type(packed.model).__name__} calls attention of layers {sorted(found)}", REMEDY)
    return [found[layer] for layer in range(len(found))]

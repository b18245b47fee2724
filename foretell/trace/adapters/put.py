"""Which layers of a model get an adapter, and the model with them: everything else is frozen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from foretell.errors import ModelError, UserError, near_names
from foretell.trace.adapters.layers import AdaptedLinear, PackedLinear, add_adapter, is_conv1d, pack_base, sizes_of
from foretell.trace.fold.blocks import find_blocks
from foretell.trace.recipe import ADAPTED, Adapters


def adapt(model: nn.Module, adapters: Adapters, base: Iterable[tuple[str, str]] = ()) -> None:
    """Put adapters on linear layers and freeze everything else.

    Without targets these are all linear layers inside the blocks, or without blocks all but the output head. Weights of
    adapted layers that `base` names are packed; a weight that two layers share is packed once.
    """
    layers = layers_to_adapt(model, adapters)
    for path, layer in layers.items():
        _refuse_rank(path, layer, adapters.rank)
    trained = _trained(model, adapters.train, layers)
    formats = _formats(layers, base)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in trained:
        for parameter in module.parameters():
            parameter.requires_grad_(True)
    packed: dict[tuple[int, str], Any] = {}
    for path, layer in layers.items():
        pack = formats.get(path)
        if pack is not None:
            pack_base(path, layer, pack, packed)
        add_adapter(layer, adapters, packed=pack is not None)


def is_adapted(model: nn.Module) -> bool:
    return any(isinstance(module, AdaptedLinear) for module in model.modules())


def packed_away(model: nn.Module) -> int:
    """How many more weights a model has than its parameters have elements: in 4 bits several are one."""
    layers = {id(layer.base_codes): layer for layer in model.modules() if isinstance(layer, PackedLinear)}
    return sum(math.prod(layer.base_shape) - layer.base_codes.numel() - layer.base_scales.numel() for layer in layers.values())


# ---------------------------------------------------------------- by name


def named(pattern: str, path: str) -> bool:
    """Whether a pattern is a path or its end; a `*` in it stands for a number."""
    wanted, parts = pattern.split("."), path.split(".")
    if len(wanted) > len(parts):
        return False
    return all(want == part or (want == "*" and part.isdigit()) for want, part in zip(wanted, parts[-len(wanted) :], strict=True))


def _refuse_unknown(told: str, pattern: str, known: Iterable[str]) -> None:
    """Say that a pattern names nothing, with the names that come nearest."""
    paths = list(known)
    ends = list(dict.fromkeys(path.rpartition(".")[2] for path in paths))
    near = near_names(pattern, ends) or near_names(pattern, paths)
    found = f"did you mean {', '.join(near)}?" if near else f"among {', '.join(ends[:8])}"
    raise UserError(told, found)


def layers_to_adapt(model: nn.Module, adapters: Adapters) -> dict[str, nn.Module]:
    """Layers that get an adapter, by path."""
    if not adapters.targets:
        layers = _inside_blocks(model)
        if not layers:
            raise ModelError(
                f"LoRA finds no linear layer to adapt in {type(model).__name__}",
                "LoRA adapts nn.Linear layers inside the repeated blocks; drop --lora, or train a part with --freeze",
            )
        return layers
    known = _linear_layers(model)
    for pattern in adapters.targets:
        if not any(named(pattern, path) for path in known):
            _refuse_unknown(f"the target '{pattern}' names no linear layer of the model", pattern, known)
    return {path: layer for path, layer in known.items() if any(named(pattern, path) for pattern in adapters.targets)}


def _refuse_rank(path: str, layer: nn.Module, rank: int) -> None:
    out_features, in_features = sizes_of(layer)
    if rank > min(out_features, in_features):
        raise UserError(
            f"rank {rank} is above the size of '{path}', {out_features} × {in_features}: an adapter would be larger than what it changes",
            f"a rank of at most {min(out_features, in_features)}, or targets without that layer",
        )


def _trained(model: nn.Module, patterns: Iterable[str], layers: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Modules that are trained whole."""
    every = {path: module for path, module in model.named_modules() if path}
    found: list[nn.Module] = []
    for pattern in patterns:
        some = {path: module for path, module in every.items() if named(pattern, path)}
        if not some:
            _refuse_unknown(f"'{pattern}', which is to be trained whole, names no module of the model", pattern, every)
        inside = [path for path in layers if any(path == one or path.startswith(f"{one}.") for one in some)]
        if inside:
            raise UserError(f"'{pattern}' is trained whole and '{inside[0]}' in it gets an adapter", "leave one of the two out")
        found += some.values()
    return found


def _formats(layers: Mapping[str, nn.Module], base: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Path → the format its weight is packed in; of several patterns the last counts."""
    found: dict[str, str] = {}
    for pattern, kind in base:
        some = [path for path in layers if pattern == ADAPTED or named(pattern, path)]
        if not some:
            _refuse_unknown(f"the base '{pattern}' names no linear layer with an adapter", pattern, layers)
        found |= dict.fromkeys(some, kind)
    return found


# ---------------------------------------------------------------- linear layers


def _linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Linear layers by path, each once.

    The output projection of `nn.MultiheadAttention` is left out: its weight is read, the layer is never called.
    """
    skipped = {id(module.out_proj) for module in model.modules() if isinstance(module, nn.MultiheadAttention)}
    found: dict[int, tuple[str, nn.Module]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        is_linear = isinstance(module, nn.Linear) or is_conv1d(type(module))
        if is_linear and id(module) not in skipped and not isinstance(module, AdaptedLinear):
            found.setdefault(id(module), (path, module))
    return dict(found.values())


def _inside_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Linear layers inside the blocks; without blocks, all but the output head."""
    blocks = tuple(f"{path}." for path in find_blocks(model))
    every = _linear_layers(model)
    if blocks:
        inside = {id(module) for path, module in model.named_modules(remove_duplicate=False) if path.startswith(blocks)}
        return {_path_in(model, module, blocks): module for module in every.values() if id(module) in inside}
    if len(every) > 1:
        head = id(_output_head(model))
        paths = [path for path, module in every.items() if id(module) == head] or list(every)
        del every[paths[-1]]
    return every


def _path_in(model: nn.Module, wanted: nn.Module, blocks: tuple[str, ...]) -> str:
    """The path of a module inside a block: it may be elsewhere too."""
    return next(path for path, module in model.named_modules(remove_duplicate=False) if module is wanted and path.startswith(blocks))


def _output_head(model: nn.Module) -> Any:
    """What a transformers model calls its head; None for others, whose last linear layer is taken for one."""
    try:
        return model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None

"""Adapters held to what peft computed once, where peft is not installed: outputs, gradients and parameters after 20 steps.

    python -m tests.pure.test_adapters_recorded        with peft 0.21 and bitsandbytes 0.50: writes data/adapters_peft.json.gz

Weights are whole numbers over a power of two, the same on every machine. Where the plain model, without adapters, computes the bits
that it computed where this was recorded, adapters must have peft's bits; a machine with other kernels must come as near as BOUNDS
says, in each tensor's norm and in entries over all of it. So must every machine in bf16: kernels of thin products differ there between
machines that agree on the plain model. Where peft is installed, test_adapters_same.py compares those bits too.
"""

from __future__ import annotations

import copy
import functools
import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretell.trace.adapters.put import adapt
from foretell.trace.recipe import ADAPTED, Adapters
from tests.further import further
from tests.pure import test_adapters_same as same

PLACE = Path(__file__).parents[1] / "data" / "adapters_peft.json.gz"
SHOWN = 5
"""Entries of a tensor that are recorded."""
BOUNDS = {"fp32": (1e-5, 1e-2), "bf16": (2e-2, 1e-1), "autocast": (2e-2, 1e-1)}
"""Of a tensor's norm, by how much it may be off: outputs and gradients of the first step; parameters after 20, since AdamW makes a
whole step of a gradient that is nearly nothing."""
WAYS = tuple(BOUNDS)
OVER_NF4 = "packed"
EVERY = [(name, kind, way) for name in same.FAMILIES for kind in same.KINDS for way in WAYS]
EVERY += [(OVER_NF4, kind, way) for kind in ("lora", "dora") for way in WAYS]
FEW = [one for one in EVERY if one[0] == OVER_NF4 or one[1:] == ("dora", "bf16")]
FEW += [one for one in EVERY if one[0] == "llama" and (one[1] == "dora" or one[2] == "fp32") and one not in FEW]


def settled(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    """Weights that every machine makes alike."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                whole = torch.randint(-(2**10), 2**10, tuple(parameter.shape), generator=draws).double()
                parameter.copy_(whole / 2**12 * scale + (1.0 if parameter.dim() == 1 and "norm" in name.lower() and "weight" in name else 0.0))


def models(name: str, kind: str, way: str) -> tuple[nn.Module, nn.Module, dict[str, Tensor], Adapters]:
    """Ours, the plain one, a batch, and the adapters."""
    dtype = torch.bfloat16 if way == "bf16" else torch.float32
    if name == OVER_NF4:
        plain: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        batch, targets = {"input": torch.randint(-64, 64, (48, 64), generator=torch.Generator().manual_seed(3)).float() / 32}, ("0", "2")
    else:
        plain, batch = same.family(name)
        targets = same.TARGETS[name]
        if "pixel_values" in batch:
            batch["pixel_values"] = torch.randint(-64, 64, (2, 3, 8, 8), generator=torch.Generator().manual_seed(3)).float() / 32
    adapters = Adapters(kind=kind, rank=same.RANK, alpha=same.ALPHA, targets=targets)
    settled(plain, 0)
    plain = plain.to(dtype)
    model = copy.deepcopy(plain)
    adapt(model, adapters, ((ADAPTED, "nf4"),) if name == OVER_NF4 else ())
    for number, layer in enumerate(same.layers_of(model).values()):
        lengths = layer.lora_magnitude.detach().clone() if kind == "dora" else None
        settled(layer, 1 + number, 0.5)
        if lengths is not None:
            layer.lora_magnitude.data.copy_(lengths)
    cast = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    return model, plain, cast, adapters


class Squared(nn.Module):
    """A model whose loss is the mean square of what it gives, in the form of transformers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input: Tensor) -> Any:
        logits = self.inner(input)
        return type("Output", (), {"logits": logits, "loss": logits.float().square().mean()})()


def computed(name: str, model: nn.Module, trained: dict[str, nn.Parameter], batch: dict[str, Tensor], way: str) -> dict[str, Tensor]:
    return same.steps_of(Squared(model) if name == OVER_NF4 else model, batch, trained, way == "autocast")


def digest(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


@functools.cache
def of_plain(name: str, way: str) -> str:
    """What this machine's kernels make of the model without adapters, in 20 steps of all its weights."""
    _, plain, batch, _ = models(name, "lora", way)
    return digest(computed(name, plain, dict(plain.named_parameters()), batch, way))


def about(tensor: Tensor) -> list[float]:
    """Norm and entries."""
    flat = tensor.detach().double().reshape(-1)
    return [float(flat.norm()), *flat[torch.linspace(0, flat.numel() - 1, SHOWN).long()].tolist()]


def known() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(PLACE.read_bytes())) if PLACE.exists() else {}
    return found


@pytest.mark.parametrize(("name", "kind", "way"), further(EVERY, FEW, "another family of the same layers, or another scale in fewer digits"))
def test_what_peft_computed_is_computed(name: str, kind: str, way: str) -> None:
    said = known()["cases"][f"{name} {kind} {way}"]
    model, _, batch, _ = models(name, kind, way)
    mine = {key: p for key, p in model.named_parameters() if p.requires_grad}
    found = computed(name, model, mine, batch, way)
    assert found.keys() == said["tensors"].keys()
    if way != "bf16" and of_plain(name, way) == said["plain"]:
        assert digest(found) == said["digest"]
    for key, tensor in found.items():
        norm, *entries = said["tensors"][key]
        first, later = BOUNDS[way]
        allowed = (first if key == "output" or key.startswith("gradient") else later) * max(norm, 1e-6)
        assert abs(about(tensor)[0] - norm) <= allowed, key
        assert all(abs(one - other) <= allowed for one, other in zip(about(tensor)[1:], entries, strict=True)), key


# ---------------------------------------------------------------- recording


def _packed_by_bitsandbytes(plain: nn.Module, dtype: torch.dtype) -> None:
    import bitsandbytes as bnb

    for name in ("0", "2"):
        one = plain.get_submodule(name)
        packed = bnb.nn.Linear4bit(one.in_features, one.out_features, compute_dtype=dtype, quant_type="nf4", compress_statistics=False)
        given = one.weight.detach().clone()
        packed.weight = bnb.nn.Params4bit(given, requires_grad=False, quant_type="nf4", compress_statistics=False, module=packed)
        packed.bias = nn.Parameter(one.bias.detach().clone())
        setattr(plain, name, packed.to("cpu"))
    plain.is_loaded_in_4bit = True  # type: ignore[assignment]  # as transformers says it, or peft takes the layers for plain ones


def _recorded() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, kind, way in EVERY:
        model, plain, batch, adapters = models(name, kind, way)
        kernels = of_plain(name, way)
        if name == OVER_NF4:
            _packed_by_bitsandbytes(plain, torch.bfloat16 if way == "bf16" else torch.float32)
        theirs, named = same.of_peft(plain, model, adapters)
        ordered = {key: named[key] for key, p in model.named_parameters() if p.requires_grad}
        found = computed(name, theirs, ordered, batch, way)
        tensors = {key: [float(f"{value:.9g}") for value in about(tensor)] for key, tensor in found.items()}
        yield f"{name} {kind} {way}", {"plain": kernels, "digest": digest(found), "tensors": tensors}


def main() -> None:
    import peft

    found = {"peft": peft.__version__, "torch": torch.__version__, "cases": dict(_recorded())}
    PLACE.write_bytes(gzip.compress(json.dumps(found).encode(), mtime=0))
    print(len(found["cases"]), "cases,", PLACE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()

"""Adapters as peft keeps them: adapter_config.json and adapter_model.safetensors, read and written. Nothing is unpickled.

    base_model.model.PATH.lora_A.weight, .lora_B.weight, .lora_magnitude_vector       of every adapted layer
    base_model.model.PATH.NAME                                                        of modules that are trained whole
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from foretell.checkpoint.convert import Written, written_folder
from foretell.checkpoint.format import TensorMeta
from foretell.checkpoint.pretrained import Offer, metadata_of, offered
from foretell.checkpoint.read import Reader
from foretell.checkpoint.store import SavedCheckpoint
from foretell.errors import FileFormatError, UserError, near_names
from foretell.trace.recipe import Adapters

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FIRST = "base_model.model."
_BASE = "foretell_base"
_ENDS = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "lora_magnitude": "lora_magnitude_vector"}
"""Of our names → of peft's."""
_ANOTHER = ("bias", "rank_pattern", "alpha_pattern", "layers_to_transform", "trainable_token_indices", "target_parameters", "use_qalora")
"""Settings of peft that make another function of the adapters, where they are set."""


@dataclass(frozen=True, kw_only=True)
class AdapterFile:
    """An adapter of peft: its settings and its tensors by our names."""

    path: Path
    adapters: Adapters
    tensors: Mapping[str, Offer]
    base: str = ""
    """Digest of the weights it was trained on, where foretell wrote it."""


# --- reading ---------------------------------------------------------------------------------------------------------


def is_adapter(path: Path) -> bool:
    return (path / CONFIG).is_file()


def read_adapter(path: Path) -> AdapterFile:
    """The adapter in a folder; what is damaged, or of another kind, is one `UserError`."""
    if not is_adapter(path):
        raise UserError(f"{path} is no adapter of peft: it has no {CONFIG}", f"a folder with {CONFIG} and {WEIGHTS}")
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{path / CONFIG} cannot be read: {' '.join(str(error).split())[:200]}", "fetch the folder again") from error
    adapters = _settings(path, config)
    if not (path / WEIGHTS).is_file():
        raise UserError(f"{path} has no {WEIGHTS}", "one with its weights as safetensors: files that run code when they are read are not loaded")
    found = {_our_name(path, name): offer for name, offer in offered(path / WEIGHTS).items()}
    if not any(name.endswith(".lora_A") for name in found):
        raise FileFormatError(f"{path / WEIGHTS} has no lora_A of any layer", "an adapter of peft's LoRA")
    return AdapterFile(path=path, adapters=adapters, tensors=found, base=metadata_of(path / WEIGHTS).get(_BASE, ""))


def _settings(path: Path, config: Mapping[str, Any]) -> Adapters:
    where, kind = path / CONFIG, config.get("peft_type")
    if kind != "LORA":
        raise UserError(f"{where} is of the kind {str(kind)[:40]!r}, which is not LoRA", "an adapter of peft's LoRA, rsLoRA or DoRA")
    strange = next((name for name in _ANOTHER if config.get(name) not in (None, False, [], {}, "none")), None)
    if strange is not None:
        raise UserError(f"{where} has {strange} {str(config[strange])[:60]}, which adapters here do not have", "one that is trained without it")
    if config.get("use_dora") and config.get("use_rslora"):
        raise UserError(f"{where} has use_dora and use_rslora, which are not run together here", "one of the two")
    targets, whole = config.get("target_modules"), config.get("modules_to_save") or []
    whole = [whole] if isinstance(whole, str) else whole
    try:
        return Adapters(
            kind="dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else "lora", rank=config["r"],
            alpha=float(config["lora_alpha"]), dropout=float(config.get("lora_dropout") or 0.0),
            targets=tuple(map(str, targets)) if isinstance(targets, list) else (), train=tuple(map(str, whole)),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"{where} lacks r or lora_alpha, or they are no numbers: {error}", "fetch the folder again") from error


def _our_name(path: Path, name: str) -> str:
    if not name.startswith(FIRST):
        raise FileFormatError(f"{path / WEIGHTS} has a tensor {name[:80]}, whose name is not one of peft's", f"names that begin with {FIRST}")
    own = name.removeprefix(FIRST)
    return next((f"{own.removesuffix(end)}{ours}" for ours, end in _ENDS.items() if own.endswith(f".{end}")), own)


def refuse_unlike(found: AdapterFile, adapters: Adapters, wanted: Mapping[str, TensorMeta], base: str) -> None:
    """Raise where an adapter is not the one that a plan trains, not of its model or not for its weights; `wanted` are the trained
    tensors, `base` the digest of the weights."""
    theirs = found.adapters
    for name in ("kind", "rank", "alpha"):
        alike = name == "kind" and {theirs.kind, adapters.kind} == {"dora", "dora-norm"}
        if getattr(theirs, name) != getattr(adapters, name) and not alike:
            has = f"has {name} {getattr(theirs, name)} and the plan has {getattr(adapters, name)}"
            raise UserError(f"{found.path} {has}", "a plan with the same")
    missing = [name for name in wanted if name not in found.tensors]
    over = [name for name in found.tensors if name not in wanted]
    if missing or over:
        one, what = (missing[0], "lacks") if missing else (over[0], "has")
        near = near_names(one, found.tensors if missing else wanted, 1)
        hint = f", nearest {near[0]}" if near else ""
        count = len(missing or over) - 1
        raise UserError(
            f"{found.path} is for another model or other targets: it {what} {one}{hint}" + (f" and {count} more" if count else ""),
            "the plan of the model that it was trained on, with the same targets",
        )
    for name, spec in wanted.items():
        if found.tensors[name].spec.shape != spec.shape:
            raise UserError(f"{found.path} is for another model: {name} is {found.tensors[name].spec} there and {spec} here",
                            "the plan of the model that it was trained on")  # fmt: skip
    if found.base and found.base != base:
        raise UserError(f"{found.path} is for another base: its digest is {found.base} and that of the model {base}",
                        "give the weights it was trained on with --init-from")  # fmt: skip


# --- writing ---------------------------------------------------------------------------------------------------------


def write_adapter(saved: SavedCheckpoint, out: Path, adapters: Adapters) -> Written:
    """The adapters of a checkpoint in a folder that peft reads."""
    reader = Reader(saved)
    listed = {full.removeprefix("model/"): spec for full, spec in reader.tensors.items() if full.startswith("model/")}
    named = {name: FIRST + _peft_name(name) for name in listed}
    back = {theirs: name for name, theirs in named.items()}

    def tensor(name: str) -> Tensor:
        return reader.whole(f"model/{back[name]}").contiguous()

    specs = {named[name]: spec for name, spec in listed.items()}
    base = str(saved.about.get("base") or "")
    config = _config(adapters, listed, str(saved.about.get("plan", {}).get("model", {}).get("model", "")))
    return written_folder(out, {WEIGHTS: specs}, tensor, {CONFIG: config}, {_BASE: base} if base else {})


def _peft_name(name: str) -> str:
    path, _, end = name.rpartition(".")
    return f"{path}.{_ENDS[end]}" if end in _ENDS else name


def _config(adapters: Adapters, names: Iterable[str], model: str) -> dict[str, Any]:
    layers = sorted({name.rpartition(".")[0] for name in names if name.endswith(".lora_A")})
    whole = sorted({name.rpartition(".")[0] for name in names if name.rpartition(".")[2] not in _ENDS})
    return {
        "peft_type": "LORA", "task_type": None, "inference_mode": True,
        "base_model_name_or_path": model.removeprefix("hf:") if "/" in model else None,
        "r": adapters.rank, "lora_alpha": adapters.alpha, "lora_dropout": adapters.dropout, "target_modules": layers,
        "modules_to_save": whole or None, "use_rslora": adapters.kind == "rslora", "use_dora": adapters.kind.startswith("dora"),
        "bias": "none", "fan_in_fan_out": False, "init_lora_weights": True,
    }  # fmt: skip

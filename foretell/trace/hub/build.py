"""Models from transformers (`hf:`), timm (`timm:`) and torchvision (`torchvision:`), built offline and without weights.

Each gets the batch and the loss its own training would use, as far as fake tensors allow; where the loss is a
stand-in, the notes say so.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.decode import json_of
from foretell.errors import MissingPackage, ModelError, UnknownName, UserError, near_names
from foretell.trace.hub.batch import batch_of, notes_on
from foretell.trace.hub.classes import built, decoded, mended, plain, rotated
from foretell.trace.hub.classes import model_class as class_of_model
from foretell.trace.hub.loss import own_loss
from foretell.trace.hub.vision import load_timm, load_torchvision, mend_torchvision

if TYPE_CHECKING:
    from torch import nn

    from foretell.trace.load.model import Source
    from foretell.trace.record.step import Workload

_PACKAGES = {"hf": ("transformers",), "timm": ("timm", "torchvision"), "torchvision": ("torchvision",)}
_EXTRAS = {"hf": "hf", "timm": "timm", "torchvision": "torchvision"}


def check(source: Source) -> None:
    """The package is there, a file that is named is there, and a model type is known: all without torch."""
    kind, _, name = source.model.partition(":")
    for package in _PACKAGES[kind]:
        if importlib.util.find_spec(package) is None:
            raise MissingPackage(package, source.model, _EXTRAS[kind])
    if not name:
        raise UserError(
            f"'{source.model}' names no model",
            f"write it like {kind}:resnet50" if kind != "hf" else "write it like hf:llama",
        )
    if kind == "hf" and is_path(name):
        read_config(name)
    elif kind == "hf":
        types = _known_types()
        if types and name not in types:
            raise UnknownName("transformers model type", name, types, "or give the path of a config.json")


def load(source: Source, notes: list[str]) -> Workload:
    """Build what the source names; what was assumed on the way is added to `notes`."""
    kind, _, name = source.model.partition(":")
    mend_torchvision()
    return {"hf": _load_hf, "timm": load_timm, "torchvision": load_torchvision}[kind](source, name, notes)


# --- transformers ----------------------------------------------------------------------------------------------------


def is_path(name: str) -> bool:
    return "/" in name or "\\" in name or name.endswith(".json") or Path(name).exists()


def _known_ids() -> dict[str, dict[str, Any]]:
    """Sizes of models that are known by their public name."""
    text = (Path(__file__).parent / "hub_ids.json").read_text(encoding="utf-8")
    known: dict[str, dict[str, Any]] = json_of(text)["models"]
    return {name: {**known[like], **one} if (like := one.pop("same_as", None)) else one for name, one in known.items()}


def _of_id(name: str) -> dict[str, Any] | None:
    """What is known of a public name such as meta-llama/Llama-3.1-8B; None for what is none."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) or name.endswith(".json") or Path(name).exists() or Path(name).parent.exists():
        return None
    known = _known_ids()
    if name not in known:
        raise UnknownName("model by its public name", name, known, "foretell works offline: give hf:PATH of a folder with its config.json")
    return {key: value for key, value in known[name].items() if key != "parameters"}


def read_config(name: str) -> dict[str, Any]:
    """A config.json, named itself or by its folder; or what is known of a public name."""
    known = _of_id(name)
    if known is not None:
        return known
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise UserError(
            f"there is no file {path}",
            "foretell works offline: give a model type (hf:llama) or a local config.json",
        )
    try:
        config = json_of(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}", "give the config.json of a transformers model") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UserError(f"{path} has no 'model_type'", "give the config.json of a transformers model")
    types = _known_types()
    if types and config["model_type"] not in types:
        raise UnknownName("transformers model type", config["model_type"], types, f"it is named in {path}")
    return config


def _known_types() -> set[str]:
    """Model types of the installed transformers, read from its source: importing it imports torch.

    Empty when that source looks different from what is known, in which case building will tell.
    """
    spec = importlib.util.find_spec("transformers")
    folder = Path(spec.origin).parent / "models" / "auto" if spec and spec.origin else Path()
    texts = [file.read_text(encoding="utf-8") for file in folder.glob("*auto*.py") if file.stem in _TYPE_LISTS]
    types = {name for text in texts for name in re.findall(r'"([\w.-]+)"[,:] "\w+Config"', text)}
    return types if len(types) > 100 else set()


_TYPE_LISTS = ("auto_mappings", "configuration_auto")


def _load_hf(source: Source, name: str, notes: list[str]) -> Workload:
    from foretell.trace.record.step import Workload

    config = config_of(source, name)
    try:
        if is_path(name) or source.overrides:
            cls = class_of_model(config)
            model = _built(cls, config)
        else:
            cls, model = built(config, lambda cls: _built(cls, config))
        if rotated(config, model):
            model = _built(cls, config)
    except (RuntimeError, UserError):
        raise
    except Exception as error:
        raise _unbuilt(source, name, error) from error
    if any("layerdrop" in key for key in config.to_dict()):
        notes.append("no layer is dropped at random (LayerDrop): a step that drops some needs less")
        _keep_all_layers(model)
    if getattr(config, "apply_spec_augment", None) is False:
        notes.append("SpecAugment masking is off")
    notes.append(f"{source.model} is built as {cls.__name__}")
    batch = batch_of(source, model, notes)
    notes.extend(notes_on(model, batch))
    return Workload(model, batch, own_loss)


def _built(cls: Any, config: Any) -> Any:
    with _without_initialisation() as skipped:
        try:
            model = cls(config)
        except Exception:
            if not skipped:
                raise
            model = None
    if model is None:  # its constructor uses what the initialisers return
        model = cls(config)
    elif skipped:
        model.tie_weights()  # skipped together with the initialisation
    return model


def _unbuilt(source: Source, name: str, error: Exception) -> Exception:
    """transformers' own error; where its defaults do not build, with what to do."""
    if is_path(name) or source.overrides or isinstance(error, RuntimeError):
        return error
    problem = f"transformers cannot build {source.model} from its defaults: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return ModelError(problem, "give the config.json of a checkpoint: hf:PATH/config.json")


def config_of(source: Source, name: str) -> Any:
    """The transformers config with overrides applied before its constructor derives other values from them."""
    from transformers import AutoConfig

    given: dict[str, Any] = read_config(name) if is_path(name) else {"model_type": name}
    given = plain(given["model_type"], decoded(given))
    given["use_cache"] = False
    kind = given.pop("model_type")
    usual = AutoConfig.for_model(kind, **plain(kind, {}))
    if hasattr(usual, "apply_spec_augment"):
        given["apply_spec_augment"] = False
    if source.image is not None:
        for path in ("image_size", "vision_config.image_size"):
            if _has(usual, path):
                put_at(given, path, source.image)
    for path, value in source.overrides.items():
        if not _has(usual, path):
            known = {*usual.to_dict(), *getattr(usual, "attribute_map", {})}
            near = near_names(path, known) or sorted(known)[:20]
            raise UserError(f"the {kind} config has no setting '{path}'", f"near names: {', '.join(near)}")
        put_at(given, path, value)
    config = mended(AutoConfig.for_model(kind, **given), given)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = getattr(getattr(config, "decoder", None), "pad_token_id", None) or 0  # labels are shifted with it
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    return config


def _has(config: Any, path: str) -> bool:
    for part in path.split("."):
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True


def put_at(given: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        given[parent] = dict(given.get(parent) or {})
        given = given[parent]
    given[last] = value


@contextmanager
def _without_initialisation() -> Iterator[bool]:
    """Skip filling weights that are not real anyway; yields whether that is done. A speed-up only."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    probe = torch.empty(0)
    with torch.device("cpu"):
        torch.linspace(0, 1, 0)  # torch notes once which functions make tensors: now, and not while transformers has its own
    skip: Callable[[], AbstractContextManager[Any]] = nullcontext
    if isinstance(probe, FakeTensor) or probe.device.type == "meta":
        for home in ("transformers.initialization", "transformers.modeling_utils"):
            try:
                skip = importlib.import_module(home).no_init_weights
                break
            except (ImportError, AttributeError):
                continue
    with warnings.catch_warnings(), skip():
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        yield skip is not nullcontext


def _keep_all_layers(model: nn.Module) -> None:
    """LayerDrop draws `torch.rand([])` and branches on it, which fake tensors cannot: let it always draw one."""
    import torch
    from torch.overrides import TorchFunctionMode

    class DrawOne(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.rand and list(args) == [[]]:
                return torch.tensor(1.0, device="cpu")
            return func(*args, **(kwargs or {}))

    plain = model.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with DrawOne():
            return plain(*args, **kwargs)

    model.forward = forward

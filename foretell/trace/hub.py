"""Models from transformers (`hf:`), timm (`timm:`) and torchvision (`torchvision:`), built offline and without weights.

Each gets the batch and the loss its own training would use, as far as fake tensors allow; where the loss is a
stand-in, the notes say so.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.decode import json_of
from foretell.errors import MissingPackage, UnknownName, UserError, near_names

if TYPE_CHECKING:
    from torch import Tensor, nn

    from foretell.trace.load import Source
    from foretell.trace.step import Workload

_PACKAGES = {"hf": ("transformers",), "timm": ("timm", "torchvision"), "torchvision": ("torchvision",)}
_EXTRAS = {"hf": "hf", "timm": "timm", "torchvision": "timm"}
_SEQ, _IMAGE, _SAMPLES, _LABELS = 1024, 224, 160_000, 64
"""Usual sizes where the config names none: tokens, pixels, ten seconds of sound at 16 kHz, letters of a transcript."""

_TEXT = ("MaskedLM", "CausalLM", "ImageTextToText", "MultimodalLM")
_SEQ2SEQ = ("Seq2SeqLM", "SpeechSeq2Seq", "ImageTextToText")
_OTHER = ("ZeroShotImageClassification", "ImageClassification", "VideoClassification", "SemanticSegmentation", "CTC",
          "AudioClassification", "SequenceClassification")  # fmt: skip


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
    if kind == "hf" and _is_path(name):
        _read_config(name)
    elif kind == "hf":
        types = _known_types()
        if types and name not in types:
            raise UnknownName("transformers model type", name, types, "or give the path of a config.json")


def load(source: Source, notes: list[str]) -> Workload:
    """Build what the source names; what was assumed on the way is added to `notes`."""
    kind, _, name = source.model.partition(":")
    mend_torchvision()
    return {"hf": _load_hf, "timm": _load_timm, "torchvision": _load_torchvision}[kind](source, name, notes)


def mend_torchvision() -> None:
    """Make `import torchvision` work beside a torch it was not built for.

    Its compiled operators then fail to load and registering their shapes fails with them. Classifiers never call
    these operators, so declaring them is enough.
    """
    import torch

    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except (RuntimeError, ImportError, OSError):
        library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _stubs.append(library)
        importlib.import_module("torchvision")


_stubs: list[Any] = []
"""Keeps the declared operators alive: a library that is collected takes them along."""


# --- transformers ----------------------------------------------------------------------------------------------------


def _is_path(name: str) -> bool:
    return "/" in name or "\\" in name or name.endswith(".json") or Path(name).exists()


def _read_config(name: str) -> dict[str, Any]:
    """A config.json, named itself or by its folder."""
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise UserError(
            f"there is no file {path}",
            "foretell downloads nothing: give a model type (hf:llama) or a local config.json",
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
    from foretell.trace.step import Workload

    config = _config(source, name)
    cls = _model_class(config)
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
    if any("layerdrop" in key for key in config.to_dict()):
        notes.append("no layer is dropped at random (LayerDrop): a step that drops some needs less")
        _keep_all_layers(model)
    if getattr(config, "apply_spec_augment", None) is False:
        notes.append("SpecAugment masking is off")
    batch = _hf_batch(source, model)
    notes.append(f"{source.model} is built as {cls.__name__}")
    if "labels" not in batch and "return_loss" not in batch:
        notes.append(f"{cls.__name__} has no loss of its own: the mean of its first output stands in for it")
    if "ForCTC" in cls.__name__:
        notes.append("CTC loss needs real lengths: the mean of the logits stands in for it")
    if "pixel_values" in inspect.signature(model.forward).parameters and "pixel_values" not in batch:
        notes.append(f"{cls.__name__} is given text only: its image part is in memory but does not run")
    return Workload(model, batch, _own_loss)


def _config(source: Source, name: str) -> Any:
    """The transformers config with overrides applied before its constructor derives other values from them."""
    from transformers import AutoConfig

    given: dict[str, Any] = _read_config(name) if _is_path(name) else {"model_type": name}
    given["use_cache"] = False
    kind = given.pop("model_type")
    plain = AutoConfig.for_model(kind)
    if hasattr(plain, "apply_spec_augment"):
        given["apply_spec_augment"] = False
    if source.image is not None:
        for path in ("image_size", "vision_config.image_size"):
            if _has(plain, path):
                _put(given, path, source.image)
    for path, value in source.overrides.items():
        if not _has(plain, path):
            known = {*plain.to_dict(), *getattr(plain, "attribute_map", {})}
            near = near_names(path, known) or sorted(known)[:20]
            raise UserError(f"the {kind} config has no setting '{path}'", f"near names: {', '.join(near)}")
        _put(given, path, value)
    config = AutoConfig.for_model(kind, **given)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    return config


def _has(config: Any, path: str) -> bool:
    for part in path.split("."):
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True


def _put(given: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        given[parent] = dict(given.get(parent) or {})
        given = given[parent]
    given[last] = value


def _model_class(config: Any) -> Any:
    """What the config says it was trained as, else the first training class there is for it.

    Encoder-decoders and masked models come before causal ones: most have a causal class too, which is only their
    decoder, or their encoder in disguise.
    """
    import transformers

    for name in config.architectures or ():
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    order = (*_SEQ2SEQ, *_TEXT, *_OTHER) if getattr(config, "is_encoder_decoder", False) else (*_TEXT, *_OTHER)
    if getattr(config, "is_decoder", False):
        order = ("CausalLM", *order)
    for auto in [f"AutoModelFor{task}" for task in order] + ["AutoModel"]:
        mapping = getattr(getattr(transformers, auto, None), "_model_mapping", {})
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise UserError(f"transformers has no model for {type(config).__name__}", "choose a model type that has one")


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


def _own_loss(output: Any, batch: Any) -> Tensor:
    """The loss the model returned; without one the mean of its first floating-point output."""
    import torch
    from torch.utils import _pytree as pytree

    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss.mean()
    values = output.values() if isinstance(output, Mapping) else [output]
    leaves = [leaf for value in values for leaf in pytree.tree_leaves(value)]
    return next(x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()).float().mean()


def _hf_batch(source: Source, model: Any) -> dict[str, Any]:
    """What the class takes, at the sizes of its config; labels if it computes a loss from them."""
    import torch

    takes = inspect.signature(model.forward).parameters
    config, text, n = model.config, model.config.get_text_config(), source.micro_batch
    main, batch = model.main_input_name, dict[str, Any]()
    if main == "input_ids" or ("input_ids" in takes and main == "pixel_values"):
        batch["input_ids"] = torch.randint(0, text.vocab_size, (n, _length(source, model, text)))
    if main == "pixel_values" or "return_loss" in takes:
        batch["pixel_values"] = torch.randn(_picture(n, config, source, model))
    if main in ("input_features", "input_values"):
        batch[main] = torch.randn(_sound(n, config, source, main))
    if not batch:
        raise UserError(
            f"{source.model} takes '{main}', for which foretell can make no batch",
            "write file.py:function that returns (model, batch)",
        )
    if "return_loss" in takes:
        batch["return_loss"] = True
    elif "labels" in takes and "ForCTC" not in type(model).__name__:
        batch["labels"] = _labels(source, model, batch)
        if "next_sentence_label" in takes:
            batch["next_sentence_label"] = torch.randint(0, 2, (n,))
    elif "decoder_input_ids" in takes:
        batch["decoder_input_ids"] = torch.randint(0, text.vocab_size, (n, source.seq or _LABELS))
    return batch


def _length(source: Source, model: Any, text: Any) -> int:
    """Tokens in a text: as asked, else what the model has positions for, up to 1,024."""
    from torch import nn

    if source.seq is not None:
        return source.seq
    limits = [_SEQ, getattr(text, "max_position_embeddings", None) or _SEQ]
    for path, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding)
            and "position" in path.rpartition(".")[2]
            and module.padding_idx is not None
        ):
            limits.append(module.num_embeddings - module.padding_idx - 1)  # positions are counted from the padding's
    return int(min(limits))


def _picture(n: int, config: Any, source: Source, model: Any) -> tuple[int, ...]:
    vision = getattr(config, "vision_config", config)
    side = source.image or getattr(vision, "image_size", None) or _IMAGE
    high, wide = (side, side) if isinstance(side, int) else tuple(side)[-2:]
    channels = getattr(vision, "num_channels", 3)
    frames = (getattr(vision, "num_frames", 16),) if "Video" in type(model).__name__ else ()
    return (n, *frames, channels, high, wide)


def _sound(n: int, config: Any, source: Source, main: str) -> tuple[int, ...]:
    """Spectrograms as each family lays them out; raw samples when the config speaks of none."""
    bins = getattr(config, "num_mel_bins", None)
    if bins and getattr(config, "max_source_positions", None) and not hasattr(config, "input_feat_per_channel"):
        return (n, bins, 2 * config.max_source_positions)  # its first convolutions halve the frames
    bins = (
        bins or getattr(config, "input_feat_per_channel", None) or getattr(config, "feature_projection_input_dim", None)
    )
    if bins:
        return (n, source.seq or getattr(config, "max_length", None) or _SEQ, bins)
    return (n, source.seq or _SAMPLES)


def _labels(source: Source, model: Any, batch: Mapping[str, Any]) -> Tensor:
    """Integer targets in the shape the task has: one per token, per picture, per pixel, or a transcript."""
    import torch

    config, name, n = model.config, type(model).__name__, source.micro_batch
    if "SemanticSegmentation" in name:
        return torch.randint(0, config.num_labels, (n, *batch["pixel_values"].shape[-2:]))
    if name.endswith("Classification") and "Token" not in name:
        return torch.randint(0, config.num_labels, (n,))
    text = config.get_text_config(decoder=True)
    if "input_ids" in batch:
        return torch.randint(0, text.vocab_size, tuple(batch["input_ids"].shape))
    limit = getattr(config, "max_target_positions", None) or getattr(text, "max_position_embeddings", None) or _LABELS
    return torch.randint(0, text.vocab_size, (n, source.seq or min(limit, _SEQ)))


# --- timm and torchvision --------------------------------------------------------------------------------------------


def _load_timm(source: Source, name: str, notes: list[str]) -> Workload:
    timm = importlib.import_module("timm")
    if not timm.is_model(name):
        raise UnknownName("timm model", name, timm.list_models(), "timm.list_models() has all")
    reject_files(source, ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"))
    options = dict(source.overrides)
    fixed = getattr(timm.models.get_pretrained_cfg(name, allow_unregistered=False), "fixed_input_size", False)
    if source.image is not None and fixed:
        options.setdefault("img_size", source.image)
    model = timm.create_model(name, pretrained=False, **options)
    channels, *sides = (model.pretrained_cfg if hasattr(model, "pretrained_cfg") else model.default_cfg)["input_size"]
    side: Any = source.image or options.get("img_size") or sides
    high, wide = (side, side) if isinstance(side, int) else side
    shape = (source.micro_batch, options.get("in_chans", channels), high, wide)
    return _classifier(model, shape, getattr(model, "num_classes", 0), notes)


def reject_files(source: Source, names: tuple[str, ...]) -> None:
    """Settings that would read weights: models are built without any."""
    for name in source.overrides:
        if name in names:
            raise UserError(f"'{name}' of {source.model} names files of weights", "models are built without weights; leave it out")


def _load_torchvision(source: Source, name: str, notes: list[str]) -> Workload:
    models = importlib.import_module("torchvision.models")
    known = models.list_models(module=models)
    if name not in known:
        raise UnknownName("torchvision classifier", name, known, "only its image classifiers can be traced")
    options = dict(source.overrides)
    if source.image is not None and name.startswith("vit_"):
        options.setdefault("image_size", source.image)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The default weight initialization")
        model = models.get_model(name, weights=None, **options)
    side: Any = source.image or getattr(model, "image_size", 299 if name.startswith("inception") else _IMAGE)
    return _classifier(model, (source.micro_batch, 3, side, side), options.get("num_classes", 1000), notes)


def _classifier(model: nn.Module, shape: tuple[int, ...], classes: int, notes: list[str]) -> Workload:
    """A batch of pictures under the name the model gives its input, with random targets beside them."""
    import torch

    from foretell.trace.step import Workload

    name = next(iter(inspect.signature(model.forward).parameters))
    batch = {name: torch.randn(shape)}
    if not classes:
        notes.append(f"{type(model).__name__} has no classes: the mean of its first output stands in for a loss")
        return Workload(model, batch, _own_loss)
    return Workload(model, {**batch, "targets": torch.randint(0, classes, shape[:1])}, _cross_entropy)


def _cross_entropy(output: Any, batch: Any) -> Tensor:
    """Of the first output, where auxiliary heads return more than one."""
    from torch.nn.functional import cross_entropy

    return cross_entropy((output[0] if isinstance(output, tuple) else output).float(), batch["targets"])

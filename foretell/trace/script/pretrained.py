"""`from_pretrained` without what it would download: the model of a configuration has the bytes of the one with weights.

    model classes, AutoModel*             made from config.json, wherever that is at hand; weights are not read
    tokenizers, processors, configs       as they are; one that is not on this machine is told in a line that names it

transformers may be imported before the script or by it: its modules are changed when they are there.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from foretell.errors import ModelError
from foretell.trace.sandbox.replaced import replaced

_MODELING = "transformers.modeling_utils"
_READ = {
    "transformers.models.auto.tokenization_auto": ("AutoTokenizer", "tokenizer"),
    "transformers.tokenization_utils_base": ("PreTrainedTokenizerBase", "tokenizer"),
    "transformers.models.auto.processing_auto": ("AutoProcessor", "processor"),
    "transformers.models.auto.image_processing_auto": ("AutoImageProcessor", "image processor"),
    "transformers.models.auto.feature_extraction_auto": ("AutoFeatureExtractor", "feature extractor"),
    "transformers.models.auto.configuration_auto": ("AutoConfig", "configuration"),
    "transformers.configuration_utils": ("PreTrainedConfig", "configuration"),
}
"""Module → the class that reads, and what it reads."""
_OF_LOADING = ("attn_implementation", "experts_implementation")
_OTHER_BYTES = ("quantization_config", "load_in_4bit", "load_in_8bit", "gguf_file")

Changes = Iterator[tuple[Any, str, Any]]
Tell = Callable[[str], None]
Asker = Callable[[], str]


class MissingCheckpoint(ModelError, OSError):
    """What transformers would have downloaded; a script may have another way for that, so it is an OSError too."""


@contextmanager
def without_weights(tell: Tell, asker: Asker) -> Iterator[None]:
    """Until the end of the block; `asker` names the line of the script that asks."""
    made: dict[str, Callable[[Any], Changes]] = {_MODELING: lambda module: _models(module, tell, asker)}
    for name, (kind, what) in _READ.items():
        made[name] = lambda module, kind=kind, what=what: _readers(module, kind, what, asker)  # type: ignore[misc]
    there = [change for name, changes in made.items() if name in sys.modules for change in changes(sys.modules[name])]
    finder = _Changing({name: changes for name, changes in made.items() if name not in sys.modules})
    sys.meta_path.insert(0, finder)
    try:
        with replaced(there):
            yield
    finally:
        sys.meta_path.remove(finder)


class _Changing(importlib.abc.MetaPathFinder):
    """Finds some modules as they are, and changes them as soon as they are imported."""

    def __init__(self, changes: dict[str, Callable[[ModuleType], Changes]]) -> None:
        self.changes = changes

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        changes = self.changes.pop(name, None)
        spec = importlib.util.find_spec(name) if changes is not None else None
        if spec is None or spec.loader is None or changes is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            for owner, attribute, ours in changes(module):
                setattr(owner, attribute, ours)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _models(module: Any, tell: Tell, asker: Asker) -> Changes:
    def from_pretrained(cls: Any, /, name: Any = None, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        other = next((key for key in _OTHER_BYTES if kwargs.get(key)), None)
        if other is not None:
            raise ModelError(f"{asker()}: {other} of from_pretrained is not followed: its weights have other bytes", "leave it out")
        made = config
        if not isinstance(config, module.PreTrainedConfig):
            made, kwargs = cls.config_class.from_pretrained(config if config is not None else name, return_unused_kwargs=True, **kwargs)
        dtype = kwargs.get("dtype") or kwargs.get("torch_dtype") or "auto"
        dtype = getattr(made, "dtype", None) if dtype == "auto" else dtype
        how = {key: kwargs[key] for key in _OF_LOADING if key in kwargs}
        model = cls._from_config(made, dtype=dtype or torch.get_default_dtype(), **how)
        tell(f"weights of {name} are not read: the model is made from its configuration")
        model.eval()
        return (model, {}) if kwargs.get("output_loading_info") else model

    yield module.PreTrainedModel, "from_pretrained", classmethod(from_pretrained)


def _readers(module: Any, kind: str, what: str, asker: Asker) -> Changes:
    owner = getattr(module, kind, None)
    plain = getattr(owner, "from_pretrained", None)
    if owner is None or plain is None:
        return
    inner = plain.__func__

    def from_pretrained(cls: Any, /, name: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return inner(cls, name, *args, **kwargs)
        except OSError as error:  # that of a tokenizer may be of its configuration: the outermost one names what was asked for
            raise MissingCheckpoint(
                f"{asker()}: the {what} of {name} is not on this machine, and a script that is followed has no network",
                f"start it once with a network, or save it in a folder and give that instead of {name}", getattr(error, "detail", str(error)),
            ) from error  # fmt: skip

    yield owner, "from_pretrained", classmethod(from_pretrained)

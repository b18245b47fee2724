"""Get a model from wherever the user has it: the zoo, transformers, timm, torchvision or a file of their own.

`check` answers at once what can be known without torch; `load` then builds the module and an example batch with
plain factory calls. The caller decides where they live: under FakeTensorMode nothing real is allocated, under
`torch.device("meta")` nothing is computed, and with neither both are real.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import foretell.zoo as zoo
from foretell.errors import ForetellError, ModelError, UnknownName, UserError
from foretell.trace.load.userfile import check_file, import_file, load_file, member, reject_unknown
from foretell.trace.sandbox import user_code
from foretell.trace.sandbox.blame import CUDA_REMEDY, is_users, model_error
from foretell.zoo.places import path_of

if TYPE_CHECKING:
    from torch import nn

    from foretell.trace.record.step import Workload

FORMS = "see `foretell zoo`; others are hf:TYPE, hf:ORG/NAME, hf:config.json, timm:NAME, torchvision:NAME, file.py:function"
HUBS = ("hf", "timm", "torchvision")
SCRIPT = "script"
"""Before the words of a command that trains: `script:python train.py --lr 1e-3`, followed and not built."""
_POSITION_TABLES = {"wpe", "positions", "position_embeddings", "embed_positions", "position_embedding"}
_READS_VALUES = "the code reads the value of a tensor (.item(), bool(), tolist(), x[mask]): use plain Python numbers there"
_notes: list[str] = []
_configs: set[str] = set()
"""Files that were read and are no modules."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a model comes from and how large its batch is. Plain data, no torch."""

    model: str
    """`llama3-8b`, `hf:llama`, `hf:path/config.json`, `timm:resnet50`, `torchvision:resnet50`, `file.py:function`; `script:` and a command."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Zoo: keywords of build(); hf: config attributes, dotted for nested ones; timm, torchvision, file: keywords."""
    micro_batch: int = 1
    seq: int | None = None
    """Text length; None = the model's usual."""
    image: int | None = None
    """Image side; None = the model's usual."""
    loss: str | None = None
    """`path/file.py:function` of (output, batch), instead of the model's own."""


def describe(source: Source) -> str:
    """One line for screens: `llama3-8b, micro-batch 1 × 8192 tokens`."""
    seq, image = source.seq, source.image
    if is_script(source.model):
        return f"{source.model.removeprefix(f'{SCRIPT}:')}, micro-batch {source.micro_batch}"
    if source.model in zoo.names():
        seq, image = zoo_sizes(zoo.get(source.model), source)
    text = f"{source.model}, micro-batch {source.micro_batch}"
    text += f" × {seq} tokens" if seq else ""
    text += f" × {image}×{image} pixels" if image else ""
    return ", ".join([text, *(f"{key}={value}" for key, value in source.overrides.items())])


def in_samples(description: str) -> str:
    """The same of a model whose batch turned out to have no tokens."""
    return re.sub(r"(, micro-batch \d+) × \d+ tokens", r"\1", description)


def check(source: Source) -> None:
    """Raise what is wrong with a source as far as that can be seen without importing torch."""
    for name in ("micro_batch", "seq", "image"):
        value = getattr(source, name)
        if value is None and name != "micro_batch":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(
                f"{name} must be a whole number above zero, got {value!r}", f"give {name} a value of 1 or more"
            )
    kind = _kind(source.model)
    if kind == "zoo":
        _check_zoo(source)
    elif kind == "file":
        check_file(source.model)
    elif kind == SCRIPT:
        from foretell.trace.script.words import of_model

        of_model(source.model)
    else:
        from foretell.trace.hub import build as hub

        hub.check(source)
    if source.loss is not None:
        check_file(source.loss)


def load(source: Source) -> Workload:
    """Build the model and one example batch, with the ambient tensor mode and device."""
    check(source)
    if is_script(source.model):
        text = source.model.removeprefix(f"{SCRIPT}:")
        raise UserError(f"'{text}' is a script: foretell follows it and does not run it", "`foretell plan eject` shows what to change in it")
    user_code.before(user_code.files_of(vars(source)))
    _notes.clear()
    _configs.update(configs_of(source.model))
    try:
        workload = _build_or_aside(source)
        _check_built(source, workload)
    except ForetellError:
        raise
    except (Exception, SystemExit) as error:
        raise model_error(source.model, error) from error
    return workload


def notes() -> list[str]:
    """What the last `load` assumed and a reader of the answer should know."""
    return list(_notes)


def user_files() -> list[str]:
    """Files of imported modules that are the user's own (or the zoo's), and configs that were read: what a cached trace depends on."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return sorted({str(Path(file).resolve()) for file in files if isinstance(file, str) and is_users(file)} | _configs)


def configs_of(model: str) -> list[str]:
    """The file that `hf:path/config.json`, or `hf:` and its folder, names."""
    prefix, _, name = model.partition(":")
    found = [path for path in (Path(name), Path(name) / "config.json") if path.is_file()] if prefix == "hf" and name else []
    return [str(path.resolve()) for path in found]


def is_script(model: str) -> bool:
    """Whether a source names a command that trains, and not a model."""
    return model.startswith(f"{SCRIPT}:")


def _kind(model: str) -> str:
    prefix, colon, _ = model.partition(":")
    if colon and prefix in (*HUBS, SCRIPT):
        return prefix
    return "file" if model.endswith(".py") or ".py:" in model else "zoo"


def _build(source: Source) -> Workload:
    from foretell.trace.record.step import Workload

    kind = _kind(source.model)
    if kind == "zoo":
        workload = _load_zoo(source)
    elif kind == "file":
        workload = load_file(source)
    else:
        from foretell.trace.hub import build as hub

        workload = hub.load(source, _notes)
    if source.loss is not None:
        path, _, name = source.loss.rpartition(":")
        workload = Workload(workload.model, workload.batch, member(import_file(Path(path)), name, path))
    return workload


def _build_or_aside(source: Source) -> Workload:
    """Build in the ambient mode; where a constructor does what fake tensors cannot, build aside and take the shapes.

    Reading a value (drop-path rates from `[x.item() for x in torch.linspace(...)]`) and casting a finished module
    (`.half()`) are the usual cases. Aside, tensors that stand for numbers are real and weights have no memory; then
    everything becomes fake.
    """
    import torch
    from torch._subclasses import fake_tensor

    from foretell.trace.load.aside import SMALL, as_ambient, weights_on_meta

    try:
        return _build(source)
    except RuntimeError as error:
        reads = isinstance(error, fake_tensor.DataDependentOutputException | fake_tensor.DynamicOutputShapeException)
        if not isinstance(torch.empty(0), fake_tensor.FakeTensor) or not (reads or "Couldn't swap" in str(error)):
            raise
        first = error
    for real_up_to in (0, SMALL):
        _notes.clear()
        try:
            with fake_tensor.unset_fake_temporarily(), weights_on_meta(real_up_to):
                workload = _build(source)
            return as_ambient(workload)
        except Exception as error:
            last = error
    made = _build_assuming(source) if reads else None
    if made is not None:
        return made
    second = model_error(source.model, last)
    if second.remedy or not reads:
        raise second from last
    told = model_error(source.model, first)
    raise ModelError(told.problem, _READS_VALUES, told.detail) from last


def _build_assuming(source: Source) -> Workload | None:
    """Build in the ambient mode, with an assumed answer wherever the code asks for what is not known."""
    import torch

    mode: Any = torch.empty(0).fake_mode  # type: ignore[attr-defined]
    _notes.clear()
    try:
        mode.patient = False
        return _build(source)
    except Exception:
        return None
    finally:
        mode.patient = True


def _check_built(source: Source, workload: Workload) -> None:
    """Devices and lengths that fake tensors would let pass and a real run would not."""
    import torch
    from torch.utils import _pytree as pytree

    allowed = {"cpu", "meta", torch.empty(0).device.type}
    tensors = [*workload.model.parameters(), *workload.model.buffers(), *pytree.tree_leaves(workload.batch)]
    strange = {leaf.device.type for leaf in tensors if isinstance(leaf, torch.Tensor)} - allowed
    if strange:
        raise ModelError(f"building {source.model} placed tensors on {', '.join(sorted(strange))}", CUDA_REMEDY)
    if any(isinstance(leaf, torch.Tensor) and source.seq in leaf.shape for leaf in pytree.tree_leaves(workload.batch)):
        _check_positions(source, workload.model)


def _check_positions(source: Source, model: nn.Module) -> None:
    """Refuse a text longer than the longest table of learned positions: fake tensors would look past its end."""
    from torch import nn

    sizes = {
        path: module.num_embeddings
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding) and path.rpartition(".")[2] in _POSITION_TABLES and "vis" not in path
    }
    if source.seq is not None and sizes and max(sizes.values()) < source.seq:
        path, size = max(sizes.items(), key=lambda item: item[1])
        raise UserError(
            f"{source.seq} tokens are more than the {size} positions of {source.model} ({path})",
            "ask for a shorter text, or override the model's number of positions",
        )


# --- zoo -------------------------------------------------------------------------------------------------------------


def _check_zoo(source: Source) -> None:
    if source.model not in zoo.names():
        raise UnknownName("model", source.model, zoo.names(), FORMS)
    reject_unknown(source.overrides, zoo_keywords(zoo.get(source.model)), source.model)


def zoo_keywords(entry: zoo.Entry) -> list[str]:
    """Keywords of a zoo module's build(), read from its source: importing it would import torch."""
    tree = ast.parse(path_of(entry.module).read_text(encoding="utf-8"))
    build = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "build")
    return [argument.arg for argument in (*build.args.args, *build.args.kwonlyargs)]


def zoo_sizes(entry: zoo.Entry, source: Source) -> tuple[int | None, int | None]:
    """Text length and image side: as asked, else as the overridden build has it, else the entry's usual."""
    seq = source.seq or (source.overrides.get("context") if entry.seq else None) or entry.seq
    image = source.image or (source.overrides.get("image") if entry.image else None) or entry.image
    return seq if entry.seq else None, image if entry.image else None


def _load_zoo(source: Source) -> Workload:
    from foretell.trace.record.step import Workload

    entry = zoo.get(source.model)
    module = zoo.load(entry)
    seq, image = zoo_sizes(entry, source)
    for name, asked, usual in (("seq", source.seq, entry.seq), ("image", source.image, entry.image)):
        if asked and not usual:
            _notes.append(f"{source.model} takes no {name}: {name} {asked} is ignored")
    config = {**entry.config, **source.overrides}
    if source.image and entry.image and "image" in zoo_keywords(entry):
        config["image"] = source.image
    model = module.build(**config)
    batch = module.batch(model, source.micro_batch, seq, image)
    return Workload(model, batch, module.loss, getattr(module, "losses", None))

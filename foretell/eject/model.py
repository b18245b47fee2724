"""The model's part of an ejected script: the zoo's own source, the user's file by its path, or transformers' class."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import foretell.zoo as zoo
from foretell.eject.compose import ScriptPart, dotted, is_word, literal, part_of, taken
from foretell.errors import UserError
from foretell.plan.recipe import source_of
from foretell.plan.types import Plan
from foretell.runtime.data.text import text_form
from foretell.trace.hub import build as hub
from foretell.trace.load import model as load
from foretell.trace.load import userfile
from foretell.trace.load.model import Source
from foretell.trace.load.output import loss_of
from foretell.trace.record.capture import no_initialisation
from foretell.trace.record.step import Workload, forward_of, given, places
from foretell.zoo.places import folders, path_of

_IMPORTS = "from typing import Any\n\nimport torch\nfrom torch import Tensor, nn\n"


@dataclass(frozen=True, kw_only=True)
class Brought:
    """What the script has of the model, and what it learns from."""

    part: ScriptPart
    workload: Workload
    """On fake tensors."""
    samples: str
    """text, indexed, stream, or example: the model's example batch at every step."""
    seq: int | None
    needs: str
    """Besides torch, in words."""


def bring(plan: Plan, data: str | None, folder: Path) -> Brought:
    """The model's part for a script in that folder; raises why where it cannot stand by itself."""
    source = source_of(plan)
    load.check(source)
    with FakeTensorMode(allow_non_fake_inputs=True), no_initialisation():
        workload = load.load(source)
    name = source.model
    if name in zoo.names():
        text, needs = _zoo(source), ""
    elif name.startswith("hf:"):
        text, needs = _hf(source, workload), "transformers"
    elif name.partition(":")[0] in ("timm", "torchvision"):
        package = name.partition(":")[0]
        raise UserError(
            f"{name} is built by {package} and has no source of its own to copy",
            "write a file.py with model() that builds it, and plan that",
        )
    else:
        text, needs = _file(source, folder), userfile.path_and_name(name)[0]
    text += _loss_text(source, workload, plan, folder)
    own, samples = _own_data(source, plan, data, folder)
    form, seq = ("", None) if own else _form(workload, name)
    if data is not None and not own and not form:
        raise UserError(f"{name} takes a batch that text alone does not give", "leave out --data, or give the model file a data(split)")
    return Brought(
        part=part_of(f'"""The model"""\n{_IMPORTS}{text}{own}{form}'),
        workload=workload, samples=samples or ("text" if form else "example"), seq=seq, needs=needs,
    )  # fmt: skip


# --- where models come from ------------------------------------------------------------------------------------------


def _zoo(source: Source) -> str:
    entry = zoo.get(source.model)
    seq, image = load.zoo_sizes(entry, source)
    config = {**entry.config, **source.overrides}
    if source.image and entry.image and "image" in load.zoo_keywords(entry):
        config["image"] = source.image
    sizes = [size for size in (("seq", seq), ("image", image)) if size[1] is not None]
    return f'''
{zoo_text(entry.module)}


def build_model() -> nn.Module:
    return build({_keywords(config)})


def example_batch(model: nn.Module) -> Any:
    return batch(model, MICRO_BATCH{"".join(f", {key}={value}" for key, value in sizes)})
'''


def zoo_text(module: str) -> str:
    """A zoo module's source, with what it takes from others in front."""
    text = path_of(module).read_text(encoding="utf-8")
    tree = ast.parse(text)
    parts = []
    for node in tree.body:
        package, _, name = (getattr(node, "module", None) or "").rpartition(".")
        if isinstance(node, ast.ImportFrom) and package.startswith("foretell.zoo.") and name in folders():
            parts.append(taken(path_of(name).read_text(encoding="utf-8"), [alias.name for alias in node.names]))
    lines = text.splitlines()
    first = tree.body[0]
    if isinstance(first, ast.Expr):  # the docstring, as a comment
        said = (ast.get_docstring(tree) or "").splitlines()
        lines[: first.end_lineno] = [f"# {line}".rstrip() for line in said]
    future = next((line for line in lines if line.startswith("from __future__")), None)
    return "\n\n\n".join([*parts, "\n".join(line for line in lines if line != future)])


def _hf(source: Source, workload: Workload) -> str:
    name, model = source.model.partition(":")[2], workload.model
    cls = type(model).__name__
    config: Any = model.config
    batch: Any = workload.batch
    odd = [key for key in batch if key not in ("input_ids", "labels")]
    reason = (
        f"it takes {', '.join(odd)}" if odd or set(batch) != {"input_ids", "labels"}
        else "it is an encoder and a decoder" if getattr(config, "is_encoder_decoder", False)
        else "it drops layers at random" if any("layerdrop" in key for key in config.to_dict())
        else ""
    )  # fmt: skip
    if reason:
        raise UserError(
            f"{source.model} ({cls}) is more than tokens and labels: {reason}",
            "write a file.py with model() and data(split) that builds it, and plan that",
        )
    given: dict[str, Any] = hub.read_config(name) if hub.is_path(name) else {"model_type": name}
    kind = given.pop("model_type")
    given["use_cache"] = False
    for path, value in source.overrides.items():
        hub.put_at(given, path, value)
    vocab = config.get_text_config().vocab_size
    return f'''
from transformers import AutoConfig, {cls}


def build_model() -> nn.Module:
    return {cls}(AutoConfig.for_model({literal(kind)}, {_keywords(given)}))


def example_batch(model: nn.Module) -> Any:
    shape = {tuple(batch["input_ids"].shape)}
    return {{"input_ids": torch.randint(0, {literal(vocab)}, shape), "labels": torch.randint(0, {literal(vocab)}, shape)}}
'''


def _file(source: Source, folder: Path) -> str:
    path, name = userfile.path_and_name(source.model)
    module = userfile.import_mended(Path(path))
    name = name or next((usual for usual in userfile.MODEL_NAMES if hasattr(module, usual)), "")
    made = getattr(module, name)
    sizes = {"micro_batch": source.micro_batch, "seq": source.seq, "image": source.image}
    if isinstance(made, nn.Module):
        call = dotted("own", name)
    else:
        call = f"{dotted('own', name)}({_keywords({**_taken(made, sizes), **source.overrides})})"
        with FakeTensorMode(allow_non_fake_inputs=True), no_initialisation():
            if not isinstance(userfile.call_by_name(made, sizes, source.overrides, source.model), nn.Module):
                raise UserError(
                    f"{source.model} returns the model together with its batch",
                    "return the model alone, and define batch(), loss() or data() beside it",
                )
    batch = getattr(module, "batch", None)
    text = f'''
{_import_text(Path(path), folder, "own")}


def build_model() -> nn.Module:
    return {call}
'''
    if not callable(batch):
        return text
    given = {key: "model" for key in inspect.signature(batch).parameters if key == "model"}
    words = ", ".join(filter(None, [*(f"{k}={v}" for k, v in given.items()), _keywords(_taken(batch, sizes))]))
    return f'''{text}

def example_batch(model: nn.Module) -> Any:
    return own.batch({words})
'''


def _import_text(path: Path, folder: Path, name: str) -> str:
    """Lines that import a file wherever it lies, its package with it."""
    path = path.resolve()
    root, packages = path.parent, [path.stem]
    while (root / "__init__.py").is_file():
        packages.insert(0, root.name)
        root = root.parent
    places = dict.fromkeys([root, path.parent])
    lines = [
        f"sys.path.insert(0, str(Path(__file__).resolve().parent / {literal(os.path.relpath(place, folder.resolve()))}))"
        for place in places
    ]
    head = "import importlib\nimport sys\nfrom pathlib import Path\n\n"
    return head + "\n".join(lines) + f"\n{name} = importlib.import_module({literal('.'.join(packages))})"


def _taken(function: Any, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the sizes that a function takes; one nobody asked for is left to its default."""
    found = inspect.signature(function).parameters
    return {
        name: sizes[name]
        for name, p in found.items()
        if name in sizes and not (sizes[name] is None and p.default is not inspect.Parameter.empty)
    }


def _keywords(values: Mapping[str, Any]) -> str:
    if all(map(is_word, values)):
        return ", ".join(f"{name}={literal(value)}" for name, value in values.items())
    return f"**{literal(values)}"


# --- loss and samples ------------------------------------------------------------------------------------------------


def _loss_text(source: Source, workload: Workload, plan: Plan, folder: Path) -> str:
    loss, head = "", ""
    if source.loss is not None:
        path, _, name = source.loss.rpartition(":")
        head, loss = _import_text(Path(path), folder, "loss_file"), dotted("loss_file", name)
    elif source.model in zoo.names():
        loss = "loss"
    elif workload.loss is not None and not source.model.startswith("hf:"):
        loss = "own.loss"
    if loss and plan.kernels.get("loss") == "compiled":
        head, loss = f"{head}\n\ncompiled_loss = torch.compile({loss})", "compiled_loss"
    call = _call_text(workload)
    if loss:
        alone = workload.loss is not None and places(workload.loss, 2) == 1
        made = f"{loss}({call})" if alone else f"{loss}({call}, rows)"
    else:
        found = loss_of(_tried(workload))
        made = found.read.format(call) if found else call
        made += ".mean()" if source.model.startswith("hf:") and made != call else ""
    return f"""
{head}


def compute_loss(model: nn.Module, rows: Any) -> Tensor:
    return {made}
"""


def _call_text(workload: Workload) -> str:
    """How the model is called with a batch."""
    batch = workload.batch
    args, kwargs = given(forward_of(workload.model), batch)
    if isinstance(batch, Mapping) and not args:
        if not all(map(is_word, kwargs)):
            return "model(**{" + ", ".join(f"{literal(key)}: rows[{literal(key)}]" for key in kwargs) + "})"
        return f"model({', '.join(f'{key}=rows[{literal(key)}]' for key in kwargs)})"
    if isinstance(batch, tuple):
        return "model(*rows)" if len(args) == len(batch) else f"model(*rows[:{len(args)}])"
    return "model(rows)"


def _tried(workload: Workload) -> Any:
    """The model's output on fake tensors."""
    from foretell.trace.flow.stages import fake_of
    from foretell.trace.record.step import call_model

    with fake_of(workload.model, workload.batch) as batch, torch.enable_grad():
        return call_model(workload.model, batch)


def _own_data(source: Source, plan: Plan, data: str | None, folder: Path) -> tuple[str, str]:
    """The text that gets the user's own samples and of which kind they are; nothing where there are none."""
    path = data if data is not None else source.model.partition(":")[0]
    if not path.endswith(".py"):
        return "", ""
    found = userfile.function(path, "data")
    if found is None:
        if data is not None:
            raise UserError(f"{path} has no function data", "define data(split) in it: anything with a length and an index")
        return "", ""
    known = {"split": "train", "micro_batch": plan.micro_batch, "seq": source.seq, "image": source.image, "seed": 0}
    made = userfile.call(found, known, f"{path}:data")
    kind = "indexed" if hasattr(made, "__getitem__") and hasattr(made, "__len__") else "stream"
    words = _keywords(_taken(found, known))
    same = data is None or Path(data).resolve() == Path(source.model.partition(":")[0]).resolve()
    head, owner = ("", "own") if same else (_import_text(Path(path), folder, "data_file"), "data_file")
    return f"{head}\n\n\ndef own_data() -> Any:\n    return {owner}.data({words})\n", kind


def _form(workload: Workload, name: str) -> tuple[str, int | None]:
    """The function that makes rows of bytes into a batch, found by trying; none where text does not do."""
    try:
        seq, form = text_form(workload.model, workload.batch, name)
    except UserError:
        return "", None
    rows = torch.arange(2 * (seq + 1)).reshape(2, seq + 1)
    made: Any = form(rows)

    def written(value: Tensor) -> str:
        if isinstance(value, FakeTensor):
            return "torch.ones_like(rows[:, 1:])"
        return "rows[:, :-1].contiguous()" if torch.equal(value, rows[:, :-1]) else "rows[:, 1:].contiguous()"

    if isinstance(made, Mapping):
        text = "{" + ", ".join(f"{literal(key)}: {written(value)}" for key, value in made.items()) + "}"
    elif isinstance(made, tuple):
        text = ", ".join(map(written, made))
    else:
        text = written(made)
    return f"\n\ndef as_batch(rows: Tensor) -> Any:\n    return {text}\n", seq

"""Get a model from wherever the user has it: the zoo, transformers, timm, torchvision or a file of their own.

`check` answers at once what can be known without torch; `load` then builds the module and an example batch with
plain factory calls. The caller decides where they live: under FakeTensorMode nothing real is allocated, under
`torch.device("meta")` nothing is computed, and with neither both are real.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from itertools import count
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from foretell import zoo
from foretell.errors import ForetellError, ModelError, UnknownName, UserError, near_names
from foretell.trace.sandbox import user_code
from foretell.trace.sandbox.blame import CUDA_REMEDY, at, chain, defined, is_users, model_error
from foretell.zoo.places import path_of

if TYPE_CHECKING:
    from torch import nn

    from foretell.trace.record.step import Workload

FORMS = "see `foretell zoo`; others are hf:TYPE, hf:ORG/NAME, hf:config.json, timm:NAME, torchvision:NAME, file.py:function"
HUBS = ("hf", "timm", "torchvision")
SCRIPT = "script"
"""Before the words of a command that trains: `script:python train.py --lr 1e-3`, followed and not built."""
EXAMPLE = """\
def model(): return MyModel()
def batch(model, micro_batch, seq): return {"x": torch.randint(0, 1000, (micro_batch, seq or 512))}
def loss(output, batch): return output.float().mean()"""
MODEL_NAMES = ("model", "build")
"""What a file's function is called when only the file is named."""
_POSITION_TABLES = {"wpe", "positions", "position_embeddings", "embed_positions", "position_embedding"}
_READS_VALUES = "the code reads the value of a tensor (.item(), bool(), tolist(), x[mask]): use plain Python numbers there"
_numbers = count()
_notes: list[str] = []


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
        _check_file(source.model)
    elif kind == SCRIPT:
        from foretell.trace.script.words import of_model

        of_model(source.model)
    else:
        from foretell.trace.hub import build as hub

        hub.check(source)
    if source.loss is not None:
        _check_file(source.loss)


def load(source: Source) -> Workload:
    """Build the model and one example batch, with the ambient tensor mode and device."""
    check(source)
    if is_script(source.model):
        text = source.model.removeprefix(f"{SCRIPT}:")
        raise UserError(f"'{text}' is a script: foretell follows it and does not run it", "`foretell plan eject` shows what to change in it")
    user_code.before(user_code.files_of(vars(source)))
    _notes.clear()
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
    """Files of imported modules that are the user's own (or the zoo's): what a cached trace depends on."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return sorted({str(Path(file).resolve()) for file in files if isinstance(file, str) and is_users(file)})


def reject_unknown(overrides: Iterable[str], known: Iterable[str], owner: str) -> None:
    """An override nobody takes is a typing error, never to be ignored."""
    known = sorted(known)
    for name in overrides:
        if name not in known:
            near = near_names(name, known) or known[:20]
            raise UserError(
                f"{owner} has no setting '{name}'", f"near names: {', '.join(near)}" if near else "it takes none"
            )


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
        workload = _load_file(source)
    else:
        from foretell.trace.hub import build as hub

        workload = hub.load(source, _notes)
    if source.loss is not None:
        path, _, name = source.loss.rpartition(":")
        workload = Workload(workload.model, workload.batch, _member(_import_file(Path(path)), name, path))
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


# --- the user's own file ---------------------------------------------------------------------------------------------


def _check_file(target: str) -> None:
    path, name = path_and_name(target)
    if not Path(path).is_file():
        raise UserError(f"there is no file {path}", "give the path of a Python file, as in path/file.py:function")
    try:
        tree = ast.parse(Path(path).read_bytes(), path)
    except (SyntaxError, ValueError) as error:
        raise model_error(target, error) from error
    names, complete = _names_of(tree)
    name = name or next((usual for usual in MODEL_NAMES if usual in names), "")
    if complete and name not in names:
        raise _no_function(
            path, name, [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        )


def path_and_name(target: str) -> tuple[str, str]:
    """`file.py:function` → both; `file.py` → the file and no name."""
    path, _, name = target.rpartition(":") if not target.endswith(".py") else (target, "", "")
    return path, name


def _no_function(path: str, name: str, functions: list[str]) -> UserError:
    asked = f"{path} has no function '{name}'" if name else f"no function given for {path}"
    example = functions[0] if functions else "build"
    return UserError(asked, f"it has: {', '.join(functions) or 'none'}; write {path}:{example}")


def _names_of(tree: ast.Module) -> tuple[set[str], bool]:
    """Names a module defines at its top level, and whether these are all (no star import, no __getattr__)."""
    names: set[str] = set()
    nodes: list[ast.AST] = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        nodes.extend(ast.iter_child_nodes(node))
    return names, not names & {"*", "__getattr__"}


def _import_file(path: Path) -> ModuleType:
    """Run a file as a module under a fresh name; its folder can be imported from, as under `python file.py`.

    In a package (a folder with `__init__.py`) relative imports work too.
    """
    path = path.resolve()
    user_code.before([str(path)])
    root, package = path.parent, list[str]()
    while (root / "__init__.py").is_file():
        package.insert(0, root.name)
        root = root.parent
    for folder in (str(path.parent), str(root)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    importlib.invalidate_caches()
    if package:
        importlib.import_module(".".join(package))
    name = ".".join([*package, f"{path.stem}_foretell{next(_numbers)}"])
    spec = importlib.util.spec_from_file_location(name, path, loader=_AsWritten(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _AsWritten(SourceFileLoader):
    """Compiles the file as it is now: kept bytecode of a file of equal size, saved in the same second, would pass for it."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)  # type: ignore[no-any-return]


def import_mended(path: Path) -> ModuleType:
    """Import the user's file; a torchvision that does not match this torch is mended once and tried again."""
    try:
        return _import_file(path)
    except Exception as error:
        if not any("torchvision::" in str(link) for link in chain(error)):
            raise
        from foretell.trace.hub import build as hub

        hub.mend_torchvision()
        return _import_file(path)


def _member(module: ModuleType, name: str, path: str) -> Callable[..., Any]:
    found: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(found):
        own = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__
        ]
        raise _no_function(path, name, own)
    return found


def call_by_name(
    function: Callable[..., Any], available: Mapping[str, Any], overrides: Mapping[str, Any], owner: str
) -> Any:
    """Call with those of `available` the function takes, and with every override, which it must take.

    A size nobody asked for (None) is left to the function's own default when it has one.
    """
    parameters = inspect.signature(function).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        reject_unknown(overrides, parameters, owner)
    given = {
        name: available[name]
        for name, p in parameters.items()
        if name in available and not (available[name] is None and p.default is not inspect.Parameter.empty)
    }
    return function(**{**given, **overrides})


def _load_file(source: Source) -> Workload:
    import torch
    from torch.utils import _pytree as pytree

    from foretell.trace.load.aside import opened
    from foretell.trace.record.step import Workload

    path, name = path_and_name(source.model)
    module = import_mended(Path(path))
    name = name or next((usual for usual in MODEL_NAMES if hasattr(module, usual)), "")
    sizes = {"micro_batch": source.micro_batch, "seq": source.seq, "image": source.image}
    made: Any = getattr(module, name, None)
    made_by = made
    if not isinstance(made, torch.nn.Module):
        made_by = _member(module, name, path)
        made = call_by_name(made_by, sizes, source.overrides, source.model)
    parts = _parts(source.model, made, at(defined(made_by)))
    for part in ("batch", "loss"):
        if parts.get(part) is None and callable(getattr(module, part, None)) and name != part:
            parts[part] = getattr(module, part)
    if callable(parts.get("batch")):
        given = {"model": parts["model"], **sizes}
        parts["batch"] = call_by_name(parts["batch"], {**given, **_by_other_names(parts["batch"], given)}, {}, f"{path}:batch")
    if parts.get("batch") is None and callable(getattr(module, "data", None)) and name != "data":
        parts["batch"] = _first_samples(lambda: call(module.data, {"split": "train", **sizes}, f"{path}:data"), source)
    batch = tuple(parts["batch"]) if isinstance(parts.get("batch"), list) else parts.get("batch")
    opened(batch)
    if not isinstance(batch, Mapping | tuple | torch.Tensor) and not pytree.tree_any(lambda leaf: isinstance(leaf, torch.Tensor), batch):
        found = "no batch" if batch is None else f"a batch of type {type(batch).__name__}"
        where = at(defined(getattr(module, "batch", None) or made_by))
        raise UserError(
            f"{source.model} gives {found}{where}",
            "return (model, batch) or define batch() or data() in the same file; a batch is a dict, tuple, tensor or object with tensors",
            EXAMPLE,
        )
    own = getattr(module, "losses", None)
    return Workload(parts["model"], batch, parts.get("loss"), own if inspect.isgeneratorfunction(own) else None)


SYNONYMS = {
    "micro_batch": ("batch_size", "bs", "batch", "n", "b", "num_samples", "size"),
    "seq": ("seq_len", "seq_length", "sequence_length", "max_length", "length", "block_size", "context", "t"),
    "image": ("image_size", "img_size", "resolution"),
}
"""Other names of a size in functions that make a batch."""
_COUNT = re.compile(r"batch|size|num|count|sample|example|many|(^|_)[bnk]($|_)", re.IGNORECASE)


def _by_other_names(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that must be given and have another name for a size; a single one that counts something is the number of samples."""
    must = [
        name for name, one in inspect.signature(function).parameters.items()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) and name not in given
    ]  # fmt: skip
    found = {other: given[name] for name, others in SYNONYMS.items() for other in must if other.lower() in others and given[name] is not None}
    unknown = [name for name in must if name not in found]
    counts = len(must) == len(unknown) == 1 and _COUNT.search(unknown[0]) is not None
    return found | ({unknown[0]: given["micro_batch"]} if counts else {})


def function(path: str, name: str) -> Callable[..., Any] | None:
    """A function of the user's file; None where it has none of that name."""
    try:
        found: Callable[..., Any] | None = getattr(import_mended(Path(path)), name, None)
    except user_code.CodeNeeded:
        raise
    except (Exception, SystemExit) as error:
        raise model_error(path, error, "importing") from error
    return found if callable(found) else None


def call(function: Callable[..., Any], available: Mapping[str, Any], owner: str) -> Any:
    """Call a function of the user's with those of `available` that it takes; what it raises is a `ModelError`."""
    try:
        return call_by_name(function, available, {}, owner)
    except ForetellError:
        raise
    except (Exception, SystemExit) as error:
        raise model_error(owner, error, "calling") from error


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether it has an argument of that name, or takes any."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _first_samples(data: Callable[[], Any], source: Source) -> Any:
    """A batch of the first samples; they are read for real, and where the ambient mode is fake only shapes are kept."""
    import torch
    from torch._subclasses import fake_tensor
    from torch.utils import _pytree as pytree
    from torch.utils.data import default_collate

    fake = isinstance(torch.empty(0), fake_tensor.FakeTensor)
    with fake_tensor.unset_fake_temporarily():
        made = data()
        if hasattr(made, "__getitem__") and hasattr(made, "__len__"):
            samples = [made[number % len(made)] for number in range(source.micro_batch)]
        else:
            samples = list(itertools.islice(iter(made), source.micro_batch))
        batch = default_collate(samples)
    return pytree.tree_map_only(torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), batch) if fake else batch


def _parts(model: str, made: Any, where: str) -> dict[str, Any]:
    """Model, batch and loss of whatever the user's function returned."""
    import torch

    if isinstance(made, torch.nn.Module):
        return {"model": made}
    parts: dict[str, Any] = {}
    if isinstance(made, tuple) and len(made) in (2, 3):
        parts = dict(zip(("model", "batch", "loss"), made, strict=False))
    elif isinstance(made, Mapping):
        reject_unknown((str(key) for key in made), ("model", "batch", "loss"), f"the dict of {model}")
        parts = dict(made)
    if not isinstance(parts.get("model"), torch.nn.Module):
        raise UserError(
            f"{model} returned {'None' if made is None else type(made).__name__}, not a model{where}",
            "return an nn.Module, a tuple (model, batch) or (model, batch, loss), or a dict with these keys",
            EXAMPLE,
        )
    return parts

"""A model in a file of the user's own: the file is imported as it is now, and its functions are called by the names of their arguments."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import SourceFileLoader
from itertools import count
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from foretell.errors import ForetellError, MissingModel, UserError, near_names
from foretell.trace.sandbox import user_code
from foretell.trace.sandbox.blame import at, chain, defined, model_error

if TYPE_CHECKING:
    from foretell.trace.load.model import Source
    from foretell.trace.record.step import Workload

EXAMPLE = """\
def model(): return MyModel()
def batch(model, micro_batch, seq): return {"x": torch.randint(0, 1000, (micro_batch, seq or 512))}
def loss(output, batch): return output.float().mean()"""
MODEL_NAMES = ("model", "build")
"""What a file's function is called when only the file is named."""
_numbers = count()


def reject_unknown(overrides: Iterable[str], known: Iterable[str], owner: str) -> None:
    """An override nobody takes is a typing error, never to be ignored."""
    known = sorted(known)
    for name in overrides:
        if name not in known:
            near = near_names(name, known) or known[:20]
            raise UserError(
                f"{owner} has no setting '{name}'", f"near names: {', '.join(near)}" if near else "it takes none"
            )


def check_file(target: str) -> None:
    path, name = path_and_name(target)
    if not Path(path).is_file():
        raise MissingModel(f"there is no file {path}", "give the path of a Python file, as in path/file.py:function")
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


def _no_function(path: str, name: str, functions: list[str]) -> MissingModel:
    asked = f"{path} has no function '{name}'" if name else f"no function given for {path}"
    example = functions[0] if functions else "build"
    return MissingModel(asked, f"it has: {', '.join(functions) or 'none'}; write {path}:{example}")


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


def import_file(path: Path) -> ModuleType:
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
        return import_file(path)
    except Exception as error:
        if not any("torchvision::" in str(link) for link in chain(error)):
            raise
        from foretell.trace.hub import build as hub

        hub.mend_torchvision()
        return import_file(path)


def member(module: ModuleType, name: str, path: str) -> Callable[..., Any]:
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


def load_file(source: Source) -> Workload:
    import torch
    from torch.utils import _pytree as pytree

    from foretell.trace.load.aside import opened
    from foretell.trace.record.step import Workload
    from foretell.trace.record.values import of_a_batch

    path, name = path_and_name(source.model)
    module = import_mended(Path(path))
    name = name or next((usual for usual in MODEL_NAMES if hasattr(module, usual)), "")
    sizes = {"micro_batch": source.micro_batch, "seq": source.seq, "image": source.image}
    made: Any = getattr(module, name, None)
    made_by = made
    if not isinstance(made, torch.nn.Module):
        made_by = member(module, name, path)
        made = call_by_name(made_by, sizes, source.overrides, source.model)
    parts = _parts(source.model, made, at(defined(made_by)))
    for part in ("batch", "loss"):
        if parts.get(part) is None and callable(getattr(module, part, None)) and name != part:
            parts[part] = getattr(module, part)
    if callable(parts.get("batch")):
        given = {"model": parts["model"], **sizes}
        make = parts["batch"]
        with of_a_batch():
            parts["batch"] = _wherever(lambda: call_by_name(make, {**given, **_by_other_names(make, given)}, {}, f"{path}:batch"))
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


def _wherever(make: Callable[[], Any]) -> Any:
    """A batch on the ambient device; where that is meta and the code reads numbers, made on the CPU and of the same shapes there."""
    import torch
    from torch.utils import _pytree as pytree

    try:
        return make()
    except (RuntimeError, NotImplementedError) as error:
        if torch.empty(0).device.type != "meta" or "meta" not in str(error):
            raise
    with torch.device("cpu"):
        return pytree.tree_map_only(torch.Tensor, lambda one: one.to("meta"), make())


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

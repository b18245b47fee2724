"""What went wrong in the user's code, in words: what failed, at which line of theirs, and what can be done.

    an exception ──► `place`: the innermost line that is the user's own
                 ──► `remedy_of`: what is known to help; nothing is proposed where nothing is known
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from foretell.errors import ModelError

CUDA_REMEDY = "build the model on the CPU or meta device; foretell decides where it runs"
BATCH_REMEDY = "check that the batch is what forward takes"
_NO_CUDA = (
    "not compiled with cuda", "not linked with support for cuda", "nvidia driver", "no cuda gpus", "no nvidia",
    "cudagetdevicecount",
)  # fmt: skip
_EXTENSION = "a compiled extension reads the tensor itself: use a plain PyTorch op there"
_LINALG = "linear algebra takes no bf16, on a GPU neither: --precision fp32, or torch.autocast(..., enabled=False) and .float() around it"
_KNOWN = {
    "Unsupported dtype BFloat16": "Fourier transforms take no bf16, on a GPU neither: --precision fp32, or .float() before them",
    "types other than float and double": _LINALG,
    "Low precision dtypes not supported": _LINALG,
    "Expected self.dtype to be equal to src.dtype": "that op takes one dtype, and autocast gives it two, on a GPU too: --precision fp32",
    "not support sparse gradients": "make the embedding with sparse=False, or train with --optimizer sgd",
    "Expected more than 1 value per channel": "a batch norm sees one number here, as on a GPU: --micro-batch 2",
    "but its data is not allocated yet": _EXTENSION,
    "Cannot access data pointer": _EXTENSION,
    "numpy.ndarray": "make the arrays tensors: torch.as_tensor(array), with dtype=torch.float32 where they are weights or pictures",
    "must be Tensor, not dict": f"{BATCH_REMEDY}: no entry is named like an argument of it, so it was given all of them as one",
    "must be Tensor, not NoneType": "something that forward needs is not in the batch, or a function returned nothing",
    "does not require grad and does not have a grad_fn": "keep .detach(), .item() and torch.no_grad() out of the way to the loss",
    "modified by an inplace operation": "an op in place changes what backward still needs: write x = x + y, not x += y",
    "Trying to backward through the graph a second time": "detach what is kept from one step to the next, or call backward once",
}
"""What PyTorch says of a step, and what can be done."""
_CHANGES: Mapping[str, Mapping[str, Any]] = {"Expected more than 1 value per channel": {"micro_batch": 2}}
_TWO_TYPES = "that op does not take what autocast gives it, on a GPU neither: --precision fp32, or .float() before it"
_SIXTEEN_BITS = re.compile(
    r"\b(bfloat16|half|float16|low precision dtypes?)\b|types other than float and double|self\.dtype to be equal to src\.dtype", re.IGNORECASE
)
"""What PyTorch says where an op does not take 16-bit numbers, or not beside others."""
_SIZES = (
    "shape", "size of tensor", "sizes of tensors", "must match", "expanded size", "expected input", "mat1 and mat2", "same number of",
    "dimension", "broadcast", "not supported: expected", "invalid for input of size", "channels", "size mismatch", "must have same", "out of range",
)  # fmt: skip
_NETWORK = ("URLError", "HTTPError", "gaierror", "ConnectionError", "ConnectionRefusedError", "LocalEntryNotFoundError", "OfflineModeIsEnabled")
_INSTALLED = {"site-packages", "dist-packages"}


@functools.cache
def is_users(file: str) -> bool:
    """Whether a Python file is the user's: not the interpreter's, not an installed package's, not foretell's own."""
    if not file.endswith(".py") or not _INSTALLED.isdisjoint(file.split(os.sep)):
        return False
    path = os.path.join((_real_folder if os.path.isabs(file) else os.path.realpath)(os.path.dirname(file)), os.path.basename(file))
    if os.path.islink(path):
        path = os.path.realpath(path)
    if not _INSTALLED.isdisjoint(path.split(os.sep)) or path.startswith(_interpreter_folders()) or not os.path.isfile(path):
        return False
    own = _own_folder()
    return path.startswith(os.path.join(own, "zoo", "")) or not path.startswith(os.path.join(own, ""))


_real_folder = functools.cache(os.path.realpath)
"""Asked once for all the modules in it."""


@functools.cache
def _own_folder() -> str:
    return str(Path(__file__).resolve().parents[2])


@functools.cache
def _interpreter_folders() -> tuple[str, ...]:
    return tuple(os.path.join(os.path.realpath(sysconfig.get_path(name)), "") for name in ("stdlib", "platstdlib", "scripts"))


def chain(error: BaseException) -> list[BaseException]:
    """An exception and what it came from."""
    found = [error]
    while (link := found[-1].__cause__ or found[-1].__context__) is not None and link not in found:
        found.append(link)
    return found


# --- where -------------------------------------------------------------------------------------------------------------


def place(error: BaseException) -> str:
    """`mine.py:12, in forward`: the innermost line of the user's own that led to it; empty where there is none."""
    if isinstance(error, SyntaxError) and error.filename and is_users(error.filename):
        return f"{short(error.filename)}:{error.lineno}"
    theirs = users_frames(error)
    if theirs:
        return f"{short(theirs[-1].filename)}:{theirs[-1].lineno}, in {theirs[-1].name}"
    noted = [note for note in getattr(error, "__notes__", ()) if note.startswith(_MADE_AT)]
    return noted[0].removeprefix(_MADE_AT) if noted else ""


_MADE_AT = "made at "
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>.+)')
_home: list[str] = []


def at_home(folder: str) -> None:
    """From where paths are told, whatever folder the user's code goes to."""
    _home[:] = [folder]


def made_at(error: BaseException, where: str) -> None:
    """Note of an exception out of backward which line of the forward it belongs to."""
    if where:
        error.add_note(f"{_MADE_AT}{where}")


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]


def short(file: str) -> str:
    """A path as a user would type it: from the current folder where it lies in it."""
    try:
        return str(Path(file).resolve().relative_to(Path(_home[0] if _home else os.getcwd()).resolve()))
    except (ValueError, OSError):
        return file


def defined(thing: Any) -> str:
    """`mine.py:5` where a function or class of the user's begins; empty for others."""
    thing = inspect.unwrap(thing) if callable(thing) and not isinstance(thing, type) else thing
    if not isinstance(thing, type) and not inspect.isroutine(thing):
        thing = type(thing)
    try:
        file = inspect.getsourcefile(thing)
        line = inspect.getsourcelines(thing)[1]
    except (TypeError, OSError):
        return ""
    return f"{short(file)}:{line}" if file is not None and is_users(str(Path(file).resolve())) else ""


def at(where: str) -> str:
    """A place as the end of a sentence."""
    return f" ({where})" if where else ""


def written(files: Iterable[str], wanted: str) -> str:
    """`mine.py:7`: the first line in these files where an expression or statement starts as is wanted, such as `sparse=True`."""
    for file in files:
        try:
            tree = ast.parse(Path(file).read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword | ast.Call | ast.Assign) and wanted in ast.unparse(node):
                smallest = min((one for one in ast.walk(node) if hasattr(one, "lineno") and wanted in ast.unparse(one)), key=_extent)
                return f"{short(file)}:{smallest.lineno}"  # type: ignore[attr-defined]
    return ""


def _extent(node: Any) -> int:
    return len(ast.unparse(node))


def users_line(text: str, innermost_last: bool = False) -> str:
    """`mine.py:12, in forward` out of a written stack, of faulthandler or of an exception: the innermost line of the user's own."""
    lines = text.splitlines()
    for line in reversed(lines) if innermost_last else lines:
        found = _FRAME.match(line.strip())
        if found is not None and is_users(found["file"]):
            name = found["name"].strip()
            return f"{short(found['file'])}:{found['line']}" + (f", in {name}" if name != "<module>" else "")
    return ""


# --- what it is --------------------------------------------------------------------------------------------------------


def model_error(model: str, error: BaseException, doing: str = "building", remedy: str = "") -> ModelError:
    """The user's exception as ours: what failed and where, the frames of theirs that led to it, and what it came from."""
    links = chain(error)
    said = str(error.msg) if isinstance(error, SyntaxError) else str(error)
    message, *more = [line.strip() for line in said.splitlines() if line.strip()] or ["no message"]
    lines = traceback.format_list(users_frames(error))  # the message is in the first line, and not told again
    lines += [f"{type(error).__name__}: {error}"] if more else []
    if error.__cause__ is not None:
        lines += [f"{chr(10) if more else ''}caused by {type(links[-1]).__name__}: {links[-1]}"]
    if isinstance(error, SystemExit):
        message = f"the code ends the program: {message}"
    problem = f"{doing} {model} failed: {type(error).__name__}: {message}{at(place(error))}"
    told = ModelError(problem, remedy or remedy_of(error), "".join(lines).rstrip())
    told.change = _change_of(error)
    return told


def _change_of(error: BaseException) -> Mapping[str, Any]:
    """Options under which that code may run."""
    texts = [str(link) for link in chain(error)]
    known = next((change for said, change in _CHANGES.items() if any(said in text for text in texts)), None)
    if known is None and isinstance(error, RuntimeError | ValueError | TypeError | NotImplementedError):
        known = {"precision": "fp32"} if any(map(_SIXTEEN_BITS.search, texts)) else None
    return known or {}


_BUILT_HERE = ("hf:", "timm:", "torchvision:")
"""Names whose batches foretell makes."""


def step_error(model: str, error: BaseException) -> ModelError:
    """The same for an exception out of a step of a model that was built."""
    told = model_error(model, error, "one step of")
    if not told.remedy and model.startswith(_BUILT_HERE):
        change = told.change
        told = ModelError(told.problem, "foretell's batch may not suit it: write file.py:function that returns (model, batch)", told.detail)
        told.change = change
    return told


def remedy_of(error: BaseException) -> str:
    links = chain(error)
    texts = [str(link) for link in links]
    if any(mark in text.lower() for text in texts for mark in _NO_CUDA):
        return CUDA_REMEDY
    for said, remedy in _KNOWN.items():
        if any(said in text for text in texts):
            return remedy
    missing = next((link.name for link in links if isinstance(link, ModuleNotFoundError) and link.name), None)
    if missing is not None:
        return (
            f"install '{missing.partition('.')[0]}' into the environment that foretell runs in; where it is an extension for GPUs, import "
            "it in a try and use plain PyTorch without it: tracing needs no GPU"
        )
    if any(type(link).__name__ in _NETWORK for link in links):
        return "build the model without downloading anything (pretrained=False, weights=None): tracing needs no weights"
    if isinstance(error, FileNotFoundError):
        return "give the file by its whole path, or leave out reading it: tracing needs no data and no weights"
    if isinstance(error, RecursionError):
        return "that function calls itself without an end"
    if isinstance(error, SystemExit):
        return "what only a script does belongs under `if __name__ == '__main__':`"
    return _of_kind(error)


def _of_kind(error: BaseException) -> str:
    """By what PyTorch's fake tensors and Python call it."""
    name, text = type(error).__name__, str(error)
    if name == "Left":
        return "take that out: the process that runs the model is ended by foretell"
    if name in ("DataDependentOutputException", "DynamicOutputShapeException"):
        return f"say what it gives: --hint '{text.strip()}=1', or compute it from plain Python numbers there"
    if name == "UnsupportedOperatorException":
        return "the op has no rule for shapes: give it one with torch.library.register_fake, or use a plain PyTorch op"
    if isinstance(error, RuntimeError) and re.search(r"\b(bfloat16|half)\b", text, re.IGNORECASE):
        return _TWO_TYPES
    if isinstance(error, RuntimeError | ValueError | IndexError) and any(mark in text.lower() for mark in _SIZES):
        if not place(error):  # no line of theirs: layers called by layers
            return "the sizes do not match: check that the batch is what forward and the loss take"
        return "the sizes do not match at that line: print them there, or check them against the batch"
    return ""

"""`foretell doctor`: what is installed, what works here, and what to install for the rest."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import typer

from foretell.cli import common

PACKAGES = (
    "torch", "numpy", "networkx", "typer", "rich", "nvidia-ml-py", "transformers", "timm", "torchvision", "triton",
)  # fmt: skip
OLDEST_TORCH = (2, 11)


def doctor(
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:
    """Check the installation: what works here and what does not. Exit 0 unless `fit` itself cannot work."""
    found = examine()
    healthy = all(item["ok"] for item in found["works"] if item["needed"])
    if json:
        common.emit_json({"doctor": found})
    else:
        common.emit("\n".join(_lines(found)))
    return common.YES if healthy else common.NO_OR_FAILED


def examine() -> dict[str, Any]:
    """Everything doctor knows, as JSON has it."""
    from foretell.hardware.this_machine import physical_cores, usable_ram

    packages = {name: _installed(name) for name in PACKAGES}
    gpus, why_none = _gpus()
    torch = _torch(packages["torch"], bool(gpus))
    cache = _cache()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "torch": torch,
        "gpus": gpus,
        "no_gpu_because": why_none,
        "cores": physical_cores(),
        "memory_bytes": usable_ram(),
        "cache": cache,
        "works": _works(packages, torch, gpus, cache),
    }


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> tuple[list[dict[str, Any]], str]:
    """NVIDIA GPUs as the driver reports them, or why there are none to report."""
    try:
        import pynvml
    except ImportError:
        return [], "the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], f"no NVIDIA driver answers ({error})"
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        found = [
            {
                "name": _text(pynvml.nvmlDeviceGetName(handle)),
                "memory_bytes": int(memory.total),
                "free_bytes": int(memory.free),
                "driver": driver,
            }
            for handle in handles
            for memory in [pynvml.nvmlDeviceGetMemoryInfo(handle)]
        ]
    except pynvml.NVMLError as error:
        return [], f"the NVIDIA driver fails to answer ({error})"
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return found, "" if found else "the NVIDIA driver sees none"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _torch(version: str | None, gpus: bool) -> dict[str, Any]:
    """Which torch, built for what; it is imported only where a GPU might be seen."""
    from foretell.trace.cuda.versions import choices_of, doubt

    checked = doubt(version) or choices_of(version) if version else ""
    found: dict[str, Any] = {"version": version, "checked": checked, "cuda_build": None, "hip_build": None, "cuda_available": False}
    spec = importlib.util.find_spec("torch")
    if version is None or spec is None or spec.origin is None:
        return found
    build = _build(Path(spec.origin).parent / "version.py")
    found["cuda_build"], found["hip_build"] = build.get("cuda"), build.get("hip")
    if (gpus and found["cuda_build"]) or found["hip_build"]:
        try:
            import torch

            found["cuda_available"] = bool(torch.cuda.is_available())
        except Exception as error:
            found["broken"] = f"{type(error).__name__}: {error}"
    return found


def _build(path: Path) -> dict[str, str | None]:
    """The constants of torch/version.py, read without importing torch."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[str, str | None] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant) and (value.value is None or isinstance(value.value, str)):
            found.update({name.id: value.value for name in targets if isinstance(name, ast.Name)})
    return found


def _cache() -> dict[str, Any]:
    from foretell.trace.store import cache

    folder = cache.folder()
    size = files = 0
    for path in folder.rglob("*") if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            if path.is_file():
                size, files = size + path.stat().st_size, files + 1
    nearest = next((parent for parent in (folder, *folder.parents) if parent.exists()), folder)
    writable = nearest.is_dir() and os.access(nearest, os.W_OK)
    return {"path": str(folder), "exists": folder.is_dir(), "writable": writable, "bytes": size, "files": files}


def _works(
    packages: Mapping[str, str | None], torch: Mapping[str, Any], gpus: list[dict[str, Any]], cache: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What a user can do here, and for what they cannot, what to do about it."""
    rows: list[dict[str, Any]] = []

    def add(what: str, ok: bool, remedy: str, *, needed: bool = False) -> None:
        rows.append({"what": what, "ok": ok, "remedy": "" if ok else remedy, "needed": needed})

    oldest = ".".join(map(str, OLDEST_TORCH))
    recent = _at_least(packages["torch"], OLDEST_TORCH) and "broken" not in torch
    add("predict for any hardware by name, without a GPU", recent, f"pip install 'torch>={oldest}'", needed=True)
    add("hf: models", packages["transformers"] is not None, "pip install 'foretell[hf]'")
    vision = packages["torchvision"] is not None
    add("timm: models", packages["timm"] is not None and vision, "pip install 'foretell[timm]'")
    add("torchvision: models", vision, "pip install 'foretell[torchvision]'")
    build = "install a CUDA build of torch" if gpus else "run on a machine with a GPU; without one, auto means this CPU"
    add("--on auto as this machine's GPU", bool(torch["cuda_available"]), build)
    add("keep traces for a faster second answer", bool(cache["writable"]), "point FORETELL_CACHE at a folder you can write")
    return rows


def _at_least(version: str | None, oldest: tuple[int, int]) -> bool:
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return match is not None and (int(match[1]), int(match[2])) >= oldest


def _lines(found: Mapping[str, Any]) -> list[str]:
    from foretell import __version__
    from foretell.units import gib, human_bytes

    torch = found["torch"]
    built = f"CUDA {torch['cuda_build']}" if torch["cuda_build"] else f"ROCm {torch['hip_build']}" if torch["hip_build"] else "CPU"
    sees = "sees a GPU" if torch["cuda_available"] else "sees no GPU"
    memory = gib(found["memory_bytes"]) if found["memory_bytes"] else "unknown"
    cards = [f"{card['name']}, {gib(card['memory_bytes'])}, driver {card['driver']}" for card in found["gpus"]]
    others = [f"{name} {version}" for name, version in found["packages"].items() if version and name != "torch"]
    cache = found["cache"]
    lines = [
        f"foretell  {__version__}, Python {found['python']}, {found['platform']}",
        f"torch     {torch['version']}, built for {built}, {sees}" if torch["version"] else "torch     not installed",
        *([f"          {torch['checked']}"] if torch["checked"] else []),
        *([f"          does not import: {torch['broken']}"] if "broken" in torch else []),
        f"packages  {', '.join(others)}",
        *(f"GPU       {card}" for card in cards or [f"none: {found['no_gpu_because']}"]),
        f"machine   {found['cores']} cores, {memory} of memory",
        f"cache     {cache['path']}, {cache['files']} files, {human_bytes(cache['bytes'])}",
        "",
    ]
    for item in found["works"]:
        mark = "yes" if item["ok"] else "NO " if item["needed"] else "no "
        lines.append(f"{mark}  {item['what']}" + (f": {item['remedy']}" if item["remedy"] else ""))
    return lines

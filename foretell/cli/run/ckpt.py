"""`foretell run ckpt`: which checkpoints a run has, whether every byte is as it was written, and what is in them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretell.cli import common
from foretell.errors import FileFormatError, UserError

if TYPE_CHECKING:
    from foretell.checkpoint.format import Manifest
    from foretell.checkpoint.store import SavedCheckpoint

_PATH = typer.Argument(..., metavar="PATH", show_default=False, help="A run folder, a folder of checkpoints, or a checkpoint.")
_JSON = typer.Option(False, "--json", help=common.JSON_HELP)
_DEBUG = typer.Option(False, "--debug", help=common.DEBUG_HELP)


def listing(path: Path = _PATH, json: bool = _JSON, debug: bool = _DEBUG) -> int:
    """List the checkpoints of a run, the newest first. Sizes and names are looked at, no tensor is read: see verify."""
    from foretell.checkpoint import store

    folder = store.folder_of(path)
    if not folder.is_dir():
        raise UserError(f"there is no folder {path}", "give the folder of a run")
    rows = [_row(one) for one in store.candidates(folder)]
    if not rows and (path / "manifest.json").exists():
        rows = [_row(path)]
    if json:
        return common.emit_json({"checkpoints": rows})
    if not rows:
        common.emit(f"{path} has no checkpoint")
    for row in rows:
        common.emit(f"{Path(row['path']).name}  {_words(row)}")
    return common.YES


def _row(path: Path) -> dict[str, Any]:
    from foretell.checkpoint import store

    try:
        saved = store.look(path)
    except FileFormatError as error:
        return {"path": str(path), "problem": error.problem}
    return {"path": str(path), **_facts(saved)}


def _facts(saved: SavedCheckpoint) -> dict[str, Any]:
    about = saved.about
    return {
        "step": saved.step, "bytes": saved.bytes, "ranks": saved.manifest.world, "date": about.get("date"),
        "generation": saved.manifest.generation, "mesh": about.get("plan", {}).get("mesh", {}),
    }  # fmt: skip


def _words(row: dict[str, Any]) -> str:
    from foretell.units import human_bytes

    if "problem" in row:
        return str(row["problem"])
    mesh = " × ".join(f"{axis} {size}" for axis, size in row["mesh"].items()) or "one rank"
    return f"{human_bytes(row['bytes'])}  {mesh}  {row['date'] or ''}"


def verify(path: Path = _PATH, json: bool = _JSON, debug: bool = _DEBUG) -> int:
    """Read every byte of a checkpoint, or of all of a run. Exit 0 if all are as written, 1 if one is not."""
    from foretell.checkpoint import store

    named = store.every(path)
    if named == [path]:
        found = {path: common.call(lambda: store.problems(path), f"reading {path}")}
    else:
        found = {one: common.call(lambda one=one: _problems(one), f"reading {one}") for one in named}  # type: ignore[misc]
    good = next((one for one, problems in found.items() if not problems), None)
    if json:
        rows = [{"path": str(one), "good": not problems, "problems": problems} for one, problems in found.items()]
        told = [problem for problems in found.values() for problem in problems]
        usable = str(good) if good is not None else None
        common.emit_json({"checkpoint": str(named[0]), "good": not told, "problems": told, "newest_good": usable, "checkpoints": rows})
    else:
        common.emit("\n".join(_verdicts(found, good, alone=named == [path])))
    return common.NO_OR_FAILED if any(found.values()) else common.YES


def _problems(path: Path) -> list[str]:
    """Of one of several: whatever kind of file it is, the others are looked at too."""
    from foretell.checkpoint import store

    try:
        return store.problems(path)
    except FileFormatError as error:
        return [error.problem]


def _verdicts(found: Mapping[Path, list[str]], good: Path | None, *, alone: bool) -> list[str]:
    from foretell.checkpoint import store

    lines = []
    for one, problems in found.items():
        if problems:
            lines += problems if alone else [f"{one} is broken:", *(f"  {problem}" for problem in problems)]
        else:
            saved = store.look(one)
            count = len(saved.files)
            lines.append(f"{one} is as it was written: {saved.bytes:,} bytes in {count} file{'s' if count > 1 else ''}")
    if alone:
        return lines
    broken = sum(map(bool, found.values()))
    used = f"--resume would use {good.name}" if good is not None else "none is good: --resume has nothing to use"
    return [*lines, f"{broken} of {len(found)} broken; {used}" if broken else f"{len(found)} checkpoints, none broken"]


def show(
    path: Path = _PATH,
    tensors: bool = typer.Option(False, "--tensors", help="List every tensor with its shape."),
    json: bool = _JSON,
    debug: bool = _DEBUG,
) -> int:
    """Say what a checkpoint holds: step, plan, weights, optimizer, position in the data."""
    saved = _chosen(path)
    if json:
        return common.emit_json({"checkpoint": _content(saved)})
    common.emit("\n".join(_lines(saved)))
    if tensors:
        for name, spec in saved.manifest.tensors.items():
            common.emit(f"  {name}  {spec}")
    return common.YES


def _chosen(path: Path) -> SavedCheckpoint:
    """The newest that has everything; newer ones that have not are told."""
    from foretell.checkpoint import store

    saved = store.look(store.resolve(path))
    for one in store.every(path):
        if one == saved.path:
            break
        common.emit(f"note: {one.name} is passed over: {_row(one).get('problem')}", sys.stderr)
    return saved


def _content(saved: SavedCheckpoint) -> dict[str, Any]:
    found = {name: value for name, value in saved.about.items() if name != "versions"}
    tensors = {name: [spec.dtype, *spec.shape] for name, spec in saved.manifest.tensors.items()}
    files = {name: vars(file) for name, file in saved.files.items()}
    return {"path": str(saved.path), **_facts(saved), **found, "saved_with": saved.about.get("versions"), "files": files, "tensors": tensors}


def _sizes(manifest: Manifest) -> dict[str, tuple[int, int]]:
    """model and optimizer → tensors and bytes."""
    from foretell.checkpoint.format import itemsize

    found: dict[str, tuple[int, int]] = {}
    for name, spec in manifest.tensors.items():
        size = itemsize(spec.dtype)
        for length in spec.shape:
            size *= length
        kind = name.partition("/")[0]
        count, total = found.get(kind, (0, 0))
        found[kind] = (count + 1, total + size)
    return found


def _lines(saved: SavedCheckpoint) -> list[str]:
    from foretell.units import human_bytes

    about, plan = saved.about, saved.about.get("plan", {})
    lines = [f"{saved.path}", f"step        {saved.step}"]
    if plan:
        mesh = " × ".join(f"{axis} {size}" for axis, size in plan.get("mesh", {}).items()) or "one rank"
        lines.append(f"plan        {plan.get('model', {}).get('model')}, {mesh}, {plan.get('precision')}, {plan.get('optimizer')}")
        lines += [f"adapters    {_adapters_words(plan)}; the weights they are for are not in it"] if plan.get("adapters") else []
    for kind, (count, size) in _sizes(saved.manifest).items():
        lines.append(f"{kind:<11} {count} tensors, {human_bytes(size)}")
    data = about.get("data", {})
    if data:
        lines.append(f"data        epoch {data.get('epoch')}, position {data.get('position')}, seed {data.get('seed')}")
    lines.append(f"files       {len(saved.files)} of {human_bytes(saved.bytes)}, generation {saved.manifest.generation}")
    versions = " ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    lines.append(f"saved       {about.get('date', 'at an unknown time')} with {versions}")
    return lines


def _adapters_words(plan: Mapping[str, Any]) -> str:
    from foretell.plan import file
    from foretell.trace.recipe import adapters_told

    found = file.from_json(plan)
    return adapters_told(found.adapters, found.base) if found.adapters is not None else ""


def convert(
    path: Path = _PATH,
    out: Path = typer.Argument(..., metavar="OUT", show_default=False, help="A folder that is not there yet."),
    to: str = typer.Option("hf", metavar="hf|peft", help="hf: safetensors with an index, as Hugging Face keeps weights; peft: the adapters."),
    dtype: str | None = typer.Option(None, metavar="NAME", show_default=False, help="float32, bfloat16 or float16; default: as they are."),
    shard: str = typer.Option("5GB", metavar="SIZE", help="The most a file may have."),
    json: bool = _JSON,
    debug: bool = _DEBUG,
) -> int:  # fmt: skip
    """Write the weights of a checkpoint in a portable format. Any plan can go on from any checkpoint: that needs no convert."""
    from foretell.units import human_bytes, parse_bytes

    if to not in ("hf", "peft"):
        raise UserError(f"--to {to} is not known", "hf or peft; a plan of any layout resumes from the checkpoint as it is")
    most = parse_bytes(shard)
    saved = _chosen(path)
    adapted = bool((saved.about.get("plan") or {}).get("adapters"))
    if adapted != (to == "peft"):
        has = "has adapters and not the weights they are for" if adapted else "has no adapters"
        raise UserError(f"{saved.path} {has}", "--to peft, or foretell run ckpt merge for whole weights" if adapted else "leave --to out")
    if adapted and dtype is not None:
        raise UserError("--dtype is given and adapters are written as they are", "leave --dtype out")

    def work() -> Any:
        if adapted:
            return _to_peft(saved, out)
        from foretell.checkpoint.convert import to_hugging_face

        return to_hugging_face(saved, out, dtype=dtype, shard_bytes=most, config=_config(saved))

    written = common.call(work, f"writing {out}")
    if json:
        return common.emit_json({"converted": written.to_json()})
    common.emit(f"{written.tensors} tensors, {human_bytes(written.bytes)}, in {', '.join(written.files)}")
    common.emit(f"written     {written.path}")
    return common.YES


def _config(saved: SavedCheckpoint) -> dict[str, Any] | None:
    """The config.json of a transformers model; None for others, and where transformers cannot make one, which is told."""
    from foretell.plan import file
    from foretell.plan.recipe import source_of

    plan = saved.about.get("plan") or {}
    kind, _, name = str(plan.get("model", {}).get("model", "")).partition(":")
    if kind != "hf":
        return None
    import json

    from foretell.trace.hub import build as hub

    try:
        config = hub.config_of(source_of(file.from_json(plan)), name)
        config.architectures, config.use_cache = [hub.class_of_model(config).__name__], True
        found: dict[str, Any] = json.loads(config.to_json_string())
    except Exception as error:  # whatever transformers makes of settings that it does not know: the weights are what was asked for
        common.emit(f"note: no config.json is written: {' '.join(str(error).split())[:200]}", sys.stderr)
        return None
    return found


def _to_peft(saved: SavedCheckpoint, out: Path) -> Any:
    from foretell.checkpoint.peft_files import write_adapter
    from foretell.plan import file

    adapters = file.from_json(saved.about.get("plan"), f"the plan of {saved.path}").adapters
    assert adapters is not None
    return write_adapter(saved, out, adapters)


def merge(
    path: Path = _PATH,
    out: Path = typer.Argument(..., metavar="OUT", show_default=False, help="A folder that is not there yet."),
    base: str | None = typer.Option(None, metavar="NAME", show_default=False,
        help="original, dequantised or requantised; default: dequantised of a packed base, else original."),
    init_from: str | None = typer.Option(None, metavar="PATH", show_default=False, help="The weights it was trained on; default: the run's own."),
    dtype: str | None = typer.Option(None, metavar="NAME", show_default=False,
        help="float32, bfloat16 or float16; default: bfloat16 of a base in 4 or 16 bits."),
    json: bool = _JSON,
    debug: bool = _DEBUG,
) -> int:  # fmt: skip
    """Write the whole model with the adapters of a checkpoint merged, and say by layer what that loses."""
    saved = _chosen(path)

    def work() -> Any:
        from foretell.runtime.train.merge import merge as merged

        return merged(saved, out, base=base, init_from=init_from, dtype=dtype)

    found = common.call(work, f"merging into {out}")
    if json:
        return common.emit_json({"merged": found.to_json()})
    common.emit("\n".join(_merged_lines(found)))
    return common.YES


MERGED_SHOWN = 8
"""Layers that are told of, those that lose most."""


def _merged_lines(found: Any) -> list[str]:
    from foretell.units import human_bytes

    worst = sorted(found.layers, key=lambda one: -one.error)[:MERGED_SHOWN]
    width = max((len(one.name) for one in worst), default=0)
    lines = [f"merged into the {found.base} base: {len(found.layers)} layers, {found.written.tensors} tensors, {human_bytes(found.written.bytes)}"]
    lines += [f"{'layer':<{width}}  learned    lost"]
    lines += [f"{one.name:<{width}}  {one.change:7.2%}  {one.error:6.1%}" for one in worst]
    lines += ["learned: the change as a share of the weight; lost: what the merged weight is off, as a share of the change"]
    if worst and worst[0].error > 1:
        lines.append(f"note: in {worst[0].name} more is lost than was learned; --base dequantised keeps what was trained")
    return [*lines, f"written     {found.written.path}"]

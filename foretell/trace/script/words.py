"""The command that a script is started with, as typed: `python train.py --lr 1e-3`, `torchrun --nproc-per-node 8 train.py`. No torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foretell.errors import MissingModel, UserError

SCRIPT = "script"
_PYTHON = re.compile(r"python(\d(\.\d+)?)?$")
_EXAMPLE = "write it like: foretell fit --on H100 -- python train.py --batch-size 64"
_FLAGS = {"-u", "-O", "-OO", "-B", "-s", "-S", "-E", "-I", "-q", "-v"}
"""Of the interpreter, which say nothing of the step."""
_WITH_VALUE = {"-W", "-X"}
AFTER = "after it took what another rank sends at"
"""How errors end of a rank that was followed without what others tell it."""
_RANKS = ("--nproc-per-node", "--nproc_per_node", "--num_processes", "--num-processes")
_NODES = ("--nnodes", "--num_machines", "--num-machines")
_LAUNCHERS = {"torchrun": (), "accelerate": ("launch",)}
_SWITCHES = {
    "--standalone", "--no-python", "--no_python", "--run-path", "--run_path", "--multi_gpu", "--multi-gpu", "--cpu", "--use_fsdp", "--use_deepspeed",
    "--no_local_rank", "--same_network", "--debug", "--quiet", "-q", "--dynamo_use_dynamic",
}  # fmt: skip
"""Of launchers, without a value."""
_TOLD = {"mixed_precision": "ACCELERATE_MIXED_PRECISION", "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"}
"""Options of accelerate → what it tells its processes by."""
_OTHERS = {"use_fsdp": "FSDP", "use_deepspeed": "DeepSpeed", "use_megatron_lm": "Megatron-LM", "config_file": "a file of settings", "cpu": "a CPU"}
"""Options of accelerate that have it train in another way."""


@dataclass(frozen=True, kw_only=True)
class ScriptCommand:
    """What is run, and by how many processes."""

    words: tuple[str, ...]
    """As typed."""
    file: str = ""
    module: str = ""
    """Instead of a file: `python -m package.train`."""
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    ranks_per_node: int = 1
    """Both 0: one for every device."""
    nodes: int = 1
    variables: dict[str, str] = field(default_factory=dict)
    """That the launcher sets, by its options."""
    launched: bool = False
    """By a launcher, which tells its processes who they are."""
    not_followed: str = ""
    """Why it cannot be followed, where it can be run."""

    @property
    def name(self) -> str:
        return self.file or self.module

    @property
    def text(self) -> str:
        return " ".join(self.words)


def model_of(words: Sequence[str]) -> str:
    """What a source calls the script of a command."""
    return f"{SCRIPT}:{shlex.join(words)}"


def of_model(model: str) -> ScriptCommand:
    """The script that a source names."""
    try:
        return parse(shlex.split(model.partition(":")[2]))
    except ValueError as error:
        raise UserError(f"'{model}' is no command: {error}", _EXAMPLE) from None


def parse(words: Sequence[str]) -> ScriptCommand:
    """The script that a command line names, to be followed; raises what is wrong with it."""
    script = named(words)
    if script.not_followed:
        raise UserError(script.not_followed, "accelerate launch --num_processes N train.py")
    return script


def named(words: Sequence[str]) -> ScriptCommand:
    """The script that a command line names, also where it can only be run."""
    if not words:
        raise UserError("no command after --", _EXAMPLE)
    first = Path(words[0]).name
    if first in _LAUNCHERS:
        return _launched(first, list(words))
    if _PYTHON.fullmatch(first):
        rest = _without_flags(list(words[1:]))
        if rest[:2] == ["-m", "torch.distributed.run"] or rest[:2] == ["-m", "torch.distributed.launch"]:
            return _launched("torchrun", ["torchrun", *rest[2:]], tuple(words))
        if rest[:3] == ["-m", "accelerate.commands.launch"]:
            return _launched("accelerate", ["accelerate", "launch", *rest[2:]], tuple(words))
        return _named(rest, tuple(words))
    if first.endswith(".py"):
        return _named(list(words), tuple(words))
    raise UserError(f"'{words[0]}' is no Python script", _EXAMPLE)


def _without_flags(rest: list[str]) -> list[str]:
    while rest and (rest[0] in _FLAGS or rest[0] in _WITH_VALUE):
        rest = rest[2:] if rest[0] in _WITH_VALUE else rest[1:]
    return rest


def _named(rest: list[str], words: tuple[str, ...], **launched: Any) -> ScriptCommand:
    if rest[:1] == ["-m"] and len(rest) > 1:
        return ScriptCommand(words=words, module=rest[1], arguments=tuple(rest[2:]), **launched)
    if not rest or rest[0].startswith("-"):
        raise UserError(f"'{' '.join(words)}' names no script", _EXAMPLE)
    if not Path(rest[0]).is_file():
        raise MissingModel(f"there is no file {rest[0]}", "name the script as you would start it from this folder")
    return ScriptCommand(words=words, file=rest[0], arguments=tuple(rest[1:]), **launched)


def _launched(launcher: str, given: list[str], typed: tuple[str, ...] | None = None) -> ScriptCommand:
    """A launcher's own options come first, then the script and its arguments."""
    typed, rest = typed or tuple(given), given[1:]
    for word in _LAUNCHERS[launcher]:
        if rest[:1] != [word]:
            raise UserError(f"'{launcher} {' '.join(rest[:1])}' starts no script", f"write it like: {launcher} {word} train.py")
        rest = rest[1:]
    options: dict[str, str] = {}
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "--module"):
        key, equals, value = rest[0].partition("=")
        if equals or key in _SWITCHES or len(rest) < 2:
            options[key], rest = value, rest[1:]
        else:
            options[key], rest = rest[1], rest[2:]
    rest = ["-m", *rest[1:]] if rest[:1] == ["--module"] else rest
    asked = next((options[key] for key in _RANKS if key in options), "1")
    nodes = _number(next((options[key] for key in _NODES if key in options), "1").split(":")[-1], "nodes")
    ranks = _number(asked, "processes") if asked not in ("gpu", "auto") else 0
    total = ranks if launcher == "accelerate" else ranks * nodes
    words = {key.lstrip("-").replace("-", "_"): value for key, value in options.items()} if launcher == "accelerate" else {}
    other = next((name for name in _OTHERS if name in words), None)
    why_not = f"accelerate launch --{other}: {_OTHERS[other]} is not followed yet" if other else ""
    told = {_TOLD[name]: value for name, value in words.items() if name in _TOLD}
    if total % nodes:
        raise UserError(f"{total} processes on {nodes} nodes: not the same number on each", "as many processes as a multiple of the nodes")
    how: dict[str, Any] = {"ranks": total, "ranks_per_node": total // nodes, "nodes": nodes, "variables": told, "launched": True}
    return _named(rest, typed, **how, not_followed=why_not)


def over(script: ScriptCommand, nodes: int, per_node: int, name: str) -> ScriptCommand:
    """The script with its number of processes, on so many devices; raises where they are more than those."""
    if not script.launched:
        return script
    if not script.ranks:
        script = replace(script, ranks=script.nodes * per_node, ranks_per_node=per_node)
    asked = f"{script.text.partition(script.name)[0].strip()} starts {script.nodes} x {script.ranks_per_node} processes"
    has = f"{name} is there {nodes} x {per_node} times"
    if script.ranks > nodes * per_node:
        raise UserError(f"{asked}, and {has}", f"--on {script.nodes}x{script.ranks_per_node}x{name}, or fewer processes")
    if script.nodes > nodes or script.ranks_per_node > per_node:
        raise UserError(f"{asked}, and {has}: other nodes than those", f"--on {script.nodes}x{script.ranks_per_node}x{name}, or other --nnodes")
    return script


def _number(text: str, what: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 10**6:
        raise UserError(f"'{text}' is no number of {what}", "write it like torchrun --nproc-per-node 8 train.py")
    return int(text)

"""A plan for a training script, as the change that one would make to the script by hand: a diff, or lines to change where no diff can be told.

    plan, script followed ──► where it makes its loader and optimizer, calls backward and steps ──► edits ──► diff for `patch -p0`
                                                                                                └─► instructions with line numbers
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from foretell.eject.places import NotFound, SourceFile, called, receiver
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.plan.blocks import expand
from foretell.plan.precision import in_plan
from foretell.plan.recipe import known_blocks
from foretell.plan.types import FP16, Plan
from foretell.search.traces.scripted import ScriptFacts, facts_of
from foretell.trace.script.words import of_model

COUNT = "micro_batches"
"""The variable that counts micro-batches."""
_KEYWORDS = {
    "TrainingArguments": ("per_device_train_batch_size", "gradient_accumulation_steps"),
    "Seq2SeqTrainingArguments": ("per_device_train_batch_size", "gradient_accumulation_steps"),
    "Accelerator": ("", "gradient_accumulation_steps"), "Trainer": ("", "accumulate_grad_batches"),
}  # fmt: skip
"""Call of a library → its words for the micro-batch and for accumulation."""
_KEPT_PRODUCTS = """\
def keep_products(context, op, *args, **kwargs):
    \"\"\"Results of matrix products and attention are kept for backward, all others computed again.\"\"\"
    aten = torch.ops.aten
    kept = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten._scaled_dot_product_flash_attention,
            aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention)
    return CheckpointPolicy.MUST_SAVE if op in [one.default for one in kept] else CheckpointPolicy.PREFER_RECOMPUTE
"""


@dataclass(kw_only=True)
class Patch:
    """What is to be done for a plan."""

    diff: str
    instructions: tuple[str, ...]
    """What the diff leaves to be done by hand."""
    command: str
    notes: tuple[str, ...]


@dataclass
class _Edits:
    plan: Plan
    facts: ScriptFacts
    files: dict[str, SourceFile] = field(default_factory=dict)
    instructions: list[str] = field(default_factory=list)
    imports: dict[str, list[str]] = field(default_factory=dict)
    """File → import lines."""
    top: dict[str, list[str]] = field(default_factory=dict)

    def at(self, what: str) -> tuple[SourceFile, int]:
        """The file and line where the script does something."""
        if what not in self.facts.places:
            raise NotFound(f"no line of the script's own makes its {what}")
        path, line, _ = self.facts.places[what]
        name = os.path.relpath(path)
        if name not in self.files:
            self.files[name] = SourceFile(name)
        return self.files[name], int(line)

    def line(self, what: str) -> str:
        path, line, _ = self.facts.places.get(what, (self.facts.script.name, 1, False))
        return f"{os.path.relpath(path)}:{line}"

    def direct(self, what: str) -> bool:
        return bool(self.facts.places.get(what, ("", 0, False))[2])

    def needs(self, file: SourceFile, *lines: str) -> None:
        found = self.imports.setdefault(file.path, [])
        found += [line for line in lines if line not in found and line not in file.lines]

    def attempt(self, edit: Callable[[], None], instruction: str) -> None:
        """An edit, or what to do by hand where its place is not found; half an edit is none."""
        before = {name: (list(file.edits), set(file.guarded)) for name, file in self.files.items()}
        try:
            edit()
        except NotFound as error:
            for name, file in self.files.items():
                file.edits, file.guarded = before.get(name, ([], set()))
            self.instructions.append(f"{instruction}  ({error})")


def patch(plan: Plan, *, cache: bool = True, time_limit: float = 600.0) -> Patch:
    """The change to the script that a plan is for."""
    script = of_model(str(plan.model["model"]))
    cluster = parse(plan.hardware)
    facts = facts_of(script.words, cluster.device.compute_capability or (9, 0), cache=cache, time_limit=time_limit)
    _refuse(plan)
    edits = _Edits(plan, facts)
    several = plan.mesh.world > 1
    if several and not (edits.direct("backward") and edits.direct("step")):
        return _by_a_library(edits)
    step, was = edits.line("step"), facts.recipe.accumulate
    if plan.micro_batch != facts.micro_batch or several:
        others = ", others on each rank" if several else ""
        edits.attempt(lambda: _loader(edits), f"{edits.line('loader')}: batches of {plan.micro_batch} samples{others}")
    if plan.accumulate != was:
        words = f"step after every {plan.accumulate} backwards instead of {was}, losses divided by {plan.accumulate}"
        edits.attempt(lambda: _accumulate(edits), f"{step}: {words}")
    if facts.held and facts.own_steps:
        words = "optimizer.zero_grad() right after the step, so that gradients are not there in the next forward"
        edits.attempt(lambda: _free(edits), f"{step}: {words}")
    _model(edits)
    if several:
        edits.attempt(lambda: _start(edits), f"{facts.script.name}: torch.distributed.init_process_group('nccl') and set_device first")
    return _patch(edits)


def _refuse(plan: Plan) -> None:
    for what, there in {"offloaded states": plan.offloads, "a pipeline": plan.pipeline, "tensor parallelism": plan.mesh.tp > 1,
                        "a loss in chunks": plan.loss_chunks > 1, "replicas that step alone": plan.sync is not None,
                        "torch.compile": plan.compile != "none"}.items():  # fmt: skip
        if there:
            raise UserError(f"{what} of the plan cannot be written into a script", "make the plan with: foretell plan -- python ...")


def _patch(edits: _Edits) -> Patch:
    for name, file in edits.files.items():
        block = "\n".join(edits.top.get(name, [])).rstrip()
        new = [*edits.imports.get(name, []), *(["", *block.split("\n"), ""] if block else [])]
        if new:
            file.insert(file.imports_end(), new)
    diff = "".join(file.diff() for file in edits.files.values() if file.edits)
    plan, script = edits.plan, edits.facts.script
    notes = []
    if plan.mesh.world > 1:
        notes.append("every rank prints and saves: print where torch.distributed.get_rank() is 0, save with torch.distributed.checkpoint")
        notes.append("samplers draw another order in every epoch after sampler.set_epoch(epoch)")
    return Patch(diff=diff, instructions=tuple(edits.instructions), command=_command(edits), notes=tuple(notes if script.file else ()))


def _command(edits: _Edits) -> str:
    import shlex

    script, world = edits.facts.script, edits.plan.mesh.world
    if world == 1:
        return script.text
    cluster = parse(edits.plan.hardware)
    nodes = f"--nnodes {cluster.nodes} " if cluster.nodes > 1 else ""
    target = [script.file] if script.file else ["-m", script.module]
    return f"torchrun {nodes}--nproc-per-node {world // max(1, cluster.nodes)} {shlex.join([*target, *script.arguments])}"


# --- the loader --------------------------------------------------------------------------------------------------------


def _keyword(file: SourceFile, call: ast.Call, name: str, value: str) -> None:
    there = next((one for one in call.keywords if one.arg == name), None)
    if there is not None:
        file.replace(there.value, value)
    elif any(one.arg is None for one in call.keywords):
        raise NotFound(f"{file.path}:{call.lineno} takes its words from elsewhere")
    else:
        given = [*call.args, *(one.value for one in call.keywords)]
        last = max(given, key=lambda one: (one.end_lineno or 0, one.end_col_offset or 0), default=None)
        if last is None:
            raise NotFound(f"{file.path}:{call.lineno} is called with nothing")
        file.append(last, f", {name}={value}")


def _library_call(edits: _Edits, which: int) -> tuple[SourceFile, ast.Call, str] | None:
    """The call of a library that says the micro-batch (0) or accumulation (1), in the script's file."""
    name = os.path.relpath(edits.facts.script.file) if edits.facts.script.file else ""
    if not name:
        return None
    file = edits.files.setdefault(name, SourceFile(name))
    for kind, words in _KEYWORDS.items():
        calls = file.calls(kind) if words[which] else []
        if calls:
            return (file, calls[0], words[which]) if len(calls) == 1 else None
    return None


def _loader(edits: _Edits) -> None:
    plan = edits.plan
    if not edits.direct("loader"):
        known = _library_call(edits, 0)
        if known is not None and plan.mesh.world == 1:
            _keyword(known[0], known[1], known[2], str(plan.micro_batch))
            return
    file, line = edits.at("loader")
    call = file.call(line, "DataLoader")
    if plan.micro_batch != edits.facts.micro_batch:
        if len(call.args) > 1:
            file.replace(call.args[1], str(plan.micro_batch))
        else:
            _keyword(file, call, "batch_size", str(plan.micro_batch))
    if plan.mesh.world > 1:
        _spread_samples(edits, file, call)


def _spread_samples(edits: _Edits, file: SourceFile, call: ast.Call) -> None:
    words = {one.arg: one for one in call.keywords}
    if len(call.args) != 1 and not (len(call.args) == 2 and isinstance(call.args[0], ast.expr)):
        raise NotFound(f"{file.path}:{call.lineno} gives its loader more by place than data and size")
    if {"sampler", "batch_sampler", None} & words.keys():
        raise NotFound(f"{file.path}:{call.lineno} has a sampler of its own")
    data = file.segment(call.args[0])
    shuffled = file.segment(words["shuffle"].value) if "shuffle" in words else "False"
    sampler = f"sampler=DistributedSampler({data}, shuffle={shuffled})"
    if "shuffle" in words:
        file.replace(words["shuffle"], sampler)
    else:
        file.append(call.args[-1], f", {sampler}")
    edits.needs(file, "from torch.utils.data.distributed import DistributedSampler")


# --- the loop ----------------------------------------------------------------------------------------------------------


def _accumulate(edits: _Edits) -> None:
    plan, facts = edits.plan, edits.facts
    known = _library_call(edits, 1) if not edits.direct("backward") else None
    if known is not None:
        _keyword(known[0], known[1], known[2], str(plan.accumulate))
        return
    if facts.recipe.accumulate > 1:
        raise NotFound("the script accumulates already")
    file, line = edits.at("backward")
    other, step_line = edits.at("step")
    node, step = file.statement(line), other.statement(step_line)
    loops = file.loops(node)
    if other is not file or not loops or loops[0] not in file.loops(step):
        raise NotFound("backward and step are not in one loop of one function")
    back = next((one for one in ast.walk(node) if isinstance(one, ast.Call) and called(one) == "backward"), None)
    if back is None or not isinstance(back.func, ast.Attribute):
        raise NotFound(f"{file.path}:{line} does not call backward itself")
    value = back.func.value
    inner = value.args[0] if isinstance(value, ast.Call) and called(value) == "scale" and len(value.args) == 1 else value
    text = file.segment(inner) if isinstance(inner, (ast.Name, ast.Attribute, ast.Call)) else f"({file.segment(inner)})"
    file.replace(inner, f"{text} / {plan.accumulate}" if inner is not value else f"({text} / {plan.accumulate})")
    updates = [one for one in ast.walk(loops[0]) if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call) and _updates(one.value)]
    if any(isinstance(one, ast.Assign) and isinstance(one.value, ast.Call) and _updates(one.value) for one in ast.walk(loops[0])):
        raise NotFound("what the update returns is used")
    file.guard([one for one in updates if one is not node], f"{COUNT} % {plan.accumulate} == 0")
    indent = " " * node.col_offset
    file.insert((node.end_lineno or node.lineno) + 1, [f"{indent}{COUNT} += 1"], -1)
    outer = loops[-1]
    file.insert(outer.lineno, [f"{' ' * outer.col_offset}{COUNT} = 0"])


def _updates(call: ast.Call) -> bool:
    """Whether a call belongs to the update: once for all micro-batches of a step."""
    name = called(call)
    return name in ("step", "unscale_", "zero_grad", "clip_grad_norm_", "clip_grad_value_") or (name == "update" and "scaler" in receiver(call))


def _free(edits: _Edits) -> None:
    """Gradients go when the update is over."""
    file, line = edits.at("step")
    node = file.statement(line)
    if not edits.direct("step") or not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        raise NotFound("a library steps")
    call = node.value
    owner = receiver(call) if "scaler" not in receiver(call) else (file.segment(call.args[0]) if call.args else "")
    if not owner:
        raise NotFound("the optimizer has no name there")
    last = next((one for one in file.calls("update", line) if "scaler" in receiver(one) and one.lineno - line < 4), None)
    after = (last.end_lineno if last is not None else node.end_lineno) or line
    extra = "    " if node.lineno in file.guarded else ""
    file.insert(after + 1, [f"{' ' * node.col_offset}{extra}{owner}.zero_grad()"], -2)


# --- the model ---------------------------------------------------------------------------------------------------------


def _model(edits: _Edits) -> None:
    """What is done to the model, right before its optimizer is made."""
    lines = _model_lines(edits)
    if not lines:
        return
    expression = str(edits.facts.named["expression"]) or "model"

    def insert() -> None:
        if not edits.facts.named["expression"]:
            raise NotFound("the model has no name there")
        file, line = edits.at("optimizer")
        node = file.statement(line)
        indent = " " * node.col_offset
        if isinstance(node, ast.Return) and edits.plan.mesh.world > 1 and expression == "self":
            raise NotFound("the model makes its own optimizer")
        _model_imports(edits, file)
        file.insert(node.lineno, [f"{indent}{text}" if text else "" for text in lines])

    told = "; ".join(text.strip() for text in lines)
    edits.attempt(insert, f"{edits.line('optimizer')}: before the optimizer is made: {told}")


def _paths(edits: _Edits, mode: str | None) -> list[str]:
    """Blocks in a mode (None: all), as the script's own name for the model reaches them."""
    blocks = known_blocks(edits.plan) or edits.facts.blocks
    modes = expand(edits.plan.blocks, blocks)
    prefix = f"{edits.facts.named['path']}." if edits.facts.named["path"] else ""
    chosen = [path for path in blocks if path.startswith(prefix) and (mode is None or (path in modes and modes[path].mode == mode))]
    return [path.removeprefix(prefix) for path in chosen]


def _over(name: str, paths: list[str]) -> str:
    """A loop over blocks: of a whole stack by its name."""
    stacks = {path.rpartition(".")[0] for path in paths}
    stack = stacks.pop() if len(stacks) == 1 else None
    if stack and paths == [f"{stack}.{n}" for n in range(len(paths))]:
        places = stack.split(".")
        if all(part.isidentifier() for part in places):
            return f"{name}.{stack}[:{len(paths)}]"
    inside = ", ".join(f'"{path}"' for path in paths)
    return f"[{name}.get_submodule(path) for path in ({inside}{',' if len(paths) == 1 else ''})]"


def _model_lines(edits: _Edits) -> list[str]:
    plan, name = edits.plan, str(edits.facts.named["expression"]) or "model"
    lines: list[str] = []
    if in_plan(edits.facts.recipe.precision) == "fp32" and plan.precision == "bf16-mixed" and plan.mesh.world == 1:
        lines.append(f'{name}.forward = torch.autocast("cuda", dtype=torch.bfloat16)({name}.forward)')
    for mode, more in (("recompute", ""), ("selective", ", context_fn=partial(create_selective_checkpoint_contexts, keep_products)")):
        if paths := _paths(edits, mode):
            again = f"partial(checkpoint, block.forward, use_reentrant=False{more})"
            lines += [f"for block in {_over(name, paths)}:", f"    block.forward = {again}"]
    mesh = plan.mesh
    if mesh.world > 1:
        if mesh.dp_replicate > 1:
            sizes = f'({mesh.dp_replicate}, {mesh.dp_shard}), mesh_dim_names=("dp_replicate", "dp_shard")'
            lines.append(f'mesh = init_device_mesh("cuda", {sizes})')
        else:
            lines.append(f'mesh = init_device_mesh("cuda", ({mesh.dp_shard},), mesh_dim_names=("dp_shard",))')
        dtype = {"bf16-mixed": "bfloat16", FP16: "float16"}.get(plan.precision)
        given = f"param_dtype=torch.{dtype}, reduce_dtype=torch.float32" if dtype else ""
        lines.append(f"policy = MixedPrecisionPolicy({given})")
        if paths := _paths(edits, None):
            how = f"mesh=mesh, mp_policy=policy, reshard_after_forward={plan.reshard}"
            lines += [f"for block in {_over(name, paths)}:", f"    fully_shard(block, {how})"]
        lines.append(f"fully_shard({name}, mesh=mesh, mp_policy=policy)")
    return lines


def _model_imports(edits: _Edits, file: SourceFile) -> None:
    modes = {one.mode for one in edits.plan.blocks.values()}
    if not file.imported("torch"):
        edits.needs(file, "import torch")
    if modes & {"recompute", "selective"}:
        edits.needs(file, "from functools import partial", "from torch.utils.checkpoint import checkpoint")
    if "selective" in modes:
        edits.needs(file, "from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts")
        edits.top.setdefault(file.path, []).append(_KEPT_PRODUCTS)
    if edits.plan.mesh.world > 1:
        edits.needs(file, "from torch.distributed.device_mesh import init_device_mesh")
        edits.needs(file, "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard")


def _start(edits: _Edits) -> None:
    """The process group, before anything is on a device."""
    if not edits.facts.script.file:
        raise NotFound("the script is started as a module")
    name = os.path.relpath(edits.facts.script.file)
    file = edits.files.setdefault(name, SourceFile(name))
    numbered = ("cuda:0", "cuda:1")
    fixed = next((node.lineno for node in ast.walk(file.tree) if isinstance(node, ast.Constant) and node.value in numbered), None)
    if fixed is not None:
        edits.instructions.append(f"{name}:{fixed}: device 'cuda' instead of a numbered one, so that each rank has its own")
    line, indent = file.start()
    edits.needs(file, *(["import os"] if not file.imported("os") else []), *(["import torch"] if not file.imported("torch") else []))
    edits.needs(file, "import torch.distributed")
    text = ['torch.distributed.init_process_group("nccl")', 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))']
    if not indent:  # right after the imports that are added there
        edits.top.setdefault(file.path, []).extend(text)
    else:
        file.insert(line, [f"{indent}{one}" for one in text])


def _by_a_library(edits: _Edits) -> Patch:
    """Several devices of a script whose loop is a library's: what to tell that library."""
    plan, facts = edits.plan, edits.facts
    name = os.path.relpath(facts.script.file) if facts.script.file else ""
    file = SourceFile(name) if name else None
    calls = [(kind, call) for kind in (*_KEYWORDS, "Fabric") if file is not None for call in file.calls(kind)]
    where = {kind: f"{name}:{call.lineno}" for kind, call in calls}
    mesh, shards = plan.mesh, plan.mesh.dp_shard > 1
    told = [f"{edits.line('loader')}: batches of {plan.micro_batch} samples on each of {mesh.world} ranks"]
    told.append(f"{edits.line('step')}: {plan.accumulate} micro-batches a step on each rank (now {facts.recipe.accumulate})")
    if "TrainingArguments" in where or "Seq2SeqTrainingArguments" in where:
        line = where.get("TrainingArguments") or where["Seq2SeqTrainingArguments"]
        how = 'fsdp="full_shard auto_wrap", fsdp_config={"version": 2}' if shards else "nothing more: its Trainer wraps the model for torchrun"
        told.append(f"{line}: per_device_train_batch_size={plan.micro_batch}, gradient_accumulation_steps={plan.accumulate}, {how}")
    elif "Accelerator" in where:
        how = "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)" if shards else "nothing more: prepare() wraps the model for torchrun"
        told.append(f"{where['Accelerator']}: gradient_accumulation_steps={plan.accumulate}, {how}")
    elif "Trainer" in where or "Fabric" in where:
        line = where.get("Trainer") or where["Fabric"]
        how = f"ModelParallelStrategy(data_parallel_size={mesh.dp_shard})" if shards else "'ddp'"
        told.append(f"{line}: devices={mesh.world}, strategy={how}")
    blocks = {mode: _paths(edits, mode) for mode in ("recompute", "selective")}
    told += [f"{edits.line('optimizer')}: blocks {', '.join(paths)} under torch.utils.checkpoint ({mode})" for mode, paths in blocks.items() if paths]
    return Patch(diff="", instructions=tuple(told), command=_command(edits), notes=())

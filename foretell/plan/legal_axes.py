"""What a plan may say of sharing positions or experts, of float8 and of states elsewhere: field, problem and remedy.
`plan.legal` asks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence

from foretell.kernels.names import KERNELS
from foretell.plan import blocks as stack
from foretell.plan import paths
from foretell.plan.states import streamed, tiers
from foretell.plan.types import AWAY, CODED_FORMATS, FLOAT8, FP16, MASTER, OWN_KERNEL, REST, SYNC_FORMATS, Plan, Split
from foretell.trace.recipe import BASE_FORMATS, coded_problems

Found = Iterator[tuple[str, str, str]]
_BY_ELEMENT = ("fp32", "split", "bf16")
"""Formats of states in which every element stands for itself, so that any cut will do."""


def context(plan: Plan, seq: int | None) -> Found:
    """Ranks that share the positions of a sample; whether a model lets them is found when it is split."""
    degree = plan.mesh.cp
    if degree == 1:
        return
    if seq is not None and seq % degree:
        less = seq // degree * degree
        yield "mesh.cp", f"{seq} tokens cannot be shared evenly by {degree} ranks", f"a sequence of {less or degree} tokens"
    elif seq is not None and plan.mesh.tp > 1 and (plan.split or Split()).sequence and seq // degree % plan.mesh.tp:
        problem = f"{seq // degree} tokens of a rank cannot be split evenly over {plan.mesh.tp} tensor ranks"
        yield "split.sequence", problem, f"a sequence of {degree * plan.mesh.tp} × n tokens, or split.sequence false"
    if plan.compile != "none":
        problem = f"is {plan.compile} and mesh.cp is {degree}: a compiler cannot look through tensors of shared positions"
        yield "compile", problem, "compile none"


def experts(plan: Plan) -> Found:
    """Data ranks that share the experts of a layer; whether a model has any is found when it is split."""
    mesh = plan.mesh
    if mesh.ep == 1:
        return
    if mesh.dp_shard % mesh.ep:
        problem = f"is {mesh.ep}, and dp_shard, of which it is a part, is {mesh.dp_shard}"
        yield "mesh.ep", problem, f"a dp_shard that {mesh.ep} divides"
    for axis, what in (("tp", "layers are split over tp"), ("cp", "positions are shared over cp")):
        if getattr(mesh, axis) > 1:
            problem = f"is {mesh.ep}, and {what} {getattr(mesh, axis)}: rows of whole samples alone are sent to experts"
            yield "mesh.ep", problem, f"ep 1, or {axis} 1"
    if plan.compile != "none":
        problem = f"is {plan.compile} and mesh.ep is {mesh.ep}: how many rows an expert gets is known only as it runs"
        yield "compile", problem, "compile none"


def float8(plan: Plan, dtypes: frozenset[str] | None) -> Found:
    """Products in float8 are torchao's, which knows nothing of tensors that are split."""
    if plan.precision != FLOAT8:
        return
    if importlib.util.find_spec("torchao") is None:
        yield "precision", "float8 needs torchao, which is not installed", "install torchao, or bf16-mixed"
    if dtypes is not None and not any(name.startswith("float8") for name in dtypes):
        yield "precision", "the device has no products in float8", "bf16-mixed"
    for axis in ("tp", "cp", "ep", "pp"):
        if getattr(plan.mesh, axis) > 1:
            problem = f"is float8 and mesh.{axis} is {getattr(plan.mesh, axis)}: its layers are run whole"
            yield "precision", problem, f"bf16-mixed, or {axis} 1"


def activations(plan: Plan) -> Found:
    """Activations that are moved: by hooks of autograd, on ranks that hold whole blocks of the whole model."""
    pattern = next((pattern for pattern, one in plan.blocks.items() if one.mode in AWAY), None)
    if pattern is None:
        return
    field, mode = f"blocks['{pattern}']", plan.blocks[pattern].mode
    for axis in ("pp", "tp", "cp", "ep"):
        if getattr(plan.mesh, axis) > 1:
            problem = f"is {mode} and mesh.{axis} is {getattr(plan.mesh, axis)}: activations are moved where a rank has whole blocks"
            yield field, problem, f"recompute, or {axis} 1"
    if plan.compile != "none":
        yield "compile", f"is {plan.compile} and {pattern} is {mode}: moving what compiled blocks save was never checked", "compile none"


def adapters(plan: Plan) -> Found:
    """Adapters, which know every axis but that of experts, and a base that is not trained."""
    if plan.adapters is None:
        if plan.base:
            pattern, kind = next(iter(plan.base.items()))
            yield f"base['{pattern}']", f"is {kind} and the plan has no adapters: weights in that format are not trained", "adapters, or no base"
        return
    for pattern, kind in plan.base.items():
        if kind not in BASE_FORMATS:
            yield f"base['{pattern}']", f"'{kind}' is not known", ", ".join(BASE_FORMATS)
    if plan.mesh.ep > 1:
        problem = f"mesh.ep is {plan.mesh.ep}, and experts are tables of weights, which have no adapters"
        yield "adapters", problem, "ep 1, and dp_shard or dp_replicate instead"
    if plan.mesh.tp > 1 and plan.adapters.kind.startswith("dora"):
        problem = f"mesh.tp is {plan.mesh.tp} and they are {plan.adapters.kind}, which needs the length of whole rows of a weight"
        yield "adapters", problem, "kind lora, or tp 1"
    if plan.mesh.tp > 1 and plan.compile != "none":
        yield "compile", f"is {plan.compile} and mesh.tp is {plan.mesh.tp}: a split layer with an adapter is not compiled", "compile none"
    if plan.mesh.tp > 1 and plan.base:
        problem = f"mesh.tp is {plan.mesh.tp}, and a weight that is packed in blocks is held and run whole"
        yield "base", problem, "tp 1, or no base"
    if plan.offloads:
        yield "adapters", "states or weights of the plan are elsewhere, and those of adapters are small", "no states, weights or bf16-master"
    if plan.precision == FLOAT8:
        yield "precision", f"is {FLOAT8}, and layers with an adapter are no plain ones", "bf16-mixed"
    if plan.adapters.train and plan.precision == "bf16" and plan.mesh.spread > 1:
        problem = "modules trained whole are in bf16 and adapters in fp32, and ranks share gradients of one format"
        yield "adapters.train", problem, "precision bf16-mixed, or one rank"


def loss_chunks(plan: Plan) -> Found:
    """An output layer and a loss that a rank computes whole, of all its tokens, in one place. Which models' losses are such is
    found as they are computed."""
    if plan.loss_chunks == 1:
        return
    for axis in ("pp", "tp", "cp", "ep"):
        if getattr(plan.mesh, axis) > 1:
            problem = f"is {plan.loss_chunks} and mesh.{axis} is {getattr(plan.mesh, axis)}: chunks are of tokens that a rank has whole"
            yield "loss_chunks", problem, f"1, or {axis} 1"
    if plan.precision == FP16:
        problem = f"is {plan.loss_chunks} and precision is {FP16}: gradients of a chunk are made before the loss is scaled, and would vanish"
        yield "loss_chunks", problem, "1, or bf16-mixed"
    if plan.compile not in ("none", "blocks"):
        problem = f"is {plan.loss_chunks} and compile is {plan.compile}: the output layer is taken out of the compiled model"
        yield "loss_chunks", problem, "1, or compile blocks"
    if plan.kernels.get("loss") is not None:
        yield "loss_chunks", f"is {plan.loss_chunks} and kernels.loss is {plan.kernels['loss']}", "1, or no kernel for the loss"


def kernels(plan: Plan) -> Found:
    """Kernels that the runtime knows, on layers that a rank has whole."""
    for op, kernel in plan.kernels.items():
        if op == "loss" and kernel == "compiled":
            continue
        if kernel != OWN_KERNEL:
            yield f"kernels['{op}']", f"'{kernel}' is not known", f"{OWN_KERNEL}, or leave it out"
        elif op not in KERNELS:
            yield f"kernels['{op}']", "there is no such kernel", ", ".join(KERNELS)
        for axis in ("tp", "cp", "ep"):
            if kernel == OWN_KERNEL and getattr(plan.mesh, axis) > 1:
                problem = f"is {kernel} and mesh.{axis} is {getattr(plan.mesh, axis)}: how layers are split was never checked with it"
                yield f"kernels['{op}']", problem, f"no kernels, or {axis} 1"


def sync(plan: Plan) -> Found:
    """Replicas that step alone: each one process, or some that share its parameters."""
    how = plan.sync
    if how is None:
        return
    if plan.mesh.dp_replicate == 1:
        yield "sync", "needs replicas to join, and mesh.dp_replicate is 1", "dp_replicate 2 or more, or no sync"
    if type(how.every) is not int or how.every < 2:
        yield "sync.every", f"is {how.every!r}, not a whole number above 1", "100, or no sync for every step"
    elif type(how.delay) is not int or not 0 <= how.delay < how.every:
        yield "sync.delay", f"is {how.delay!r}, and a round of {how.every} steps ends before the next one's does", f"0 to {how.every - 1}"
    if how.quorum:
        yield from _quorum(plan, how.quorum, how.grace, how.delay)
    if not 0 < how.lr <= 100:
        yield "sync.outer.lr", f"is {how.lr}, not a learning rate", "0.7"
    if not 0 <= how.momentum <= 1:
        yield "sync.outer.momentum", f"is {how.momentum}, not a share", "0.9"
    if how.format not in SYNC_FORMATS:
        yield "sync.format", f"'{how.format}' is not known", ", ".join(SYNC_FORMATS)
    for axis in ("pp", "tp", "cp", "ep"):
        if getattr(plan.mesh, axis) > 1:
            problem = f"mesh.{axis} is {getattr(plan.mesh, axis)}, and replicas that step alone have whole layers, or shards of them"
            yield "sync", problem, f"{axis} 1, and dp_shard instead"
    if plan.offloads:
        yield "sync", "states or weights of the plan are elsewhere, and weights are joined on the device", "no states, weights or bf16-master"
    if plan.precision in ("bf16", FP16, FLOAT8):
        why = {"bf16": "whose weights are too coarse for small steps of all replicas", FP16: "whose scale of the loss replicas would share"}
        problem = f"sync is given and precision is {plan.precision}, {why.get(plan.precision, 'whose weights are no plain tensors')}"
        yield "precision", problem, "fp32, or bf16-mixed"
    if plan.compile == "graphs":
        yield "compile", "is graphs, and weights of replicas change between steps", "compile model"


def _quorum(plan: Plan, quorum: int, grace: float, delay: int) -> Found:
    """Replicas that may come and go, each one process."""
    if type(quorum) is not int or not 1 <= quorum <= plan.mesh.dp_replicate:
        yield "sync.quorum", f"is {quorum!r}, and there are {plan.mesh.dp_replicate} replicas", f"1 to {plan.mesh.dp_replicate}, or 0 for always all"
    if not 0 <= grace < 1e6:
        yield "sync.grace", f"is {grace}, not a number of seconds", "10"
    if delay:
        yield "sync.delay", f"is {delay} beside sync.quorum, whose replicas wait for the end of a round", "0, or no quorum"
    if plan.mesh.dp_shard > 1:
        problem = f"is given and mesh.dp_shard is {plan.mesh.dp_shard}: a replica that comes and goes is one process"
        yield "sync.quorum", problem, "dp_shard 1, or no quorum"


def states(plan: Plan, blocks: Sequence[str] | None) -> Found:
    """Optimizer states that are not on the device, or not in the weights' own format."""
    if not 0 <= plan.cpu_share <= 1:
        yield "cpu_share", f"is {plan.cpu_share}, not a share", "a number from 0 to 1"
    if plan.coded:
        yield from _coded(plan)
    elif plan.state_format != "fp32" and plan.precision != MASTER:
        elsewhere = plan.state_format in CODED_FORMATS
        problem = "beside states or weights that are elsewhere needs bf16 weights with a master" if elsewhere else "needs bf16 weights with a master"
        yield "state_format", f"is {plan.state_format}, which {problem}", f"precision {MASTER}, or fp32"
    elif plan.state_format == "int4":
        yield "state_format", f"is int4, and with precision {MASTER} states have 8 bits at least", "int8, or precision bf16-mixed"
    if plan.cpu_share and "host" not in plan.states.values():
        yield "cpu_share", f"is {plan.cpu_share}, and the CPU updates states that are on the host: none is", "states on the host, or 0"
    if not plan.offloads:
        return
    field = "states" if plan.states else "weights" if plan.weights else "precision"
    if plan.precision == FP16:
        yield "precision", f"is {FP16}, whose scaled gradients are not moved with states or weights", "fp32, or nothing elsewhere"
    if plan.mesh.world > 1:
        yield from _on_ranks(plan, field)
    if plan.compile not in ("none", "blocks"):
        problem = f"is {plan.compile}, and blocks wait for their update in between"
        yield "compile", problem, "compile blocks, or none"
    if plan.optimizer.partition("-")[0] not in ("adamw", "adam"):
        yield "optimizer", f"is {plan.optimizer}, and moved states are AdamW's", "adamw-fused"
    if plan.weights and plan.compile != "none":
        yield "compile", f"is {plan.compile}, and weights that come and go are not compiled", "compile none"
    if blocks is None:
        return
    for field, patterns in (("states", plan.states), ("weights", plan.weights)):
        for pattern in patterns:
            unknown = stack.strangers(pattern, blocks) if pattern != REST or field == "weights" else ()
            if unknown:
                yield field, f"{', '.join(unknown)} is no block of the model", f"a block, or {REST} of states for what is in none"
                return
    kept = sorted(path for path in streamed(plan, blocks) if tiers(plan, blocks)[path] == "device")
    if kept:
        yield "weights", f"{', '.join(paths.fold_names(kept))}: weights on the host, optimizer states on the device", "states there too"


def _coded(plan: Plan) -> Found:
    """Moments in codes, on the device beside weights without a master."""
    for problem, remedy in coded_problems(plan.state_format, plan.optimizer, plan.precision == FP16):
        yield "state_format", f"is {plan.state_format}, and {problem}", remedy
    if plan.precision == FLOAT8:
        yield "state_format", f"is {plan.state_format}, and weights of {FLOAT8} are no plain tensors", "bf16-mixed"
    for axis in ("tp", "ep"):
        if getattr(plan.mesh, axis) > 1:
            problem = f"is {plan.state_format} and mesh.{axis} is {getattr(plan.mesh, axis)}: rows with one scale are not cut"
            yield "state_format", problem, f"{axis} 1, or fp32"


def _on_ranks(plan: Plan, field: str) -> Found:
    """With several ranks: each has the states of its own pieces of whole layers."""
    for axis in ("pp", "tp", "cp", "ep"):
        if getattr(plan.mesh, axis) > 1:
            problem = f"mesh.{axis} is {getattr(plan.mesh, axis)}, and states are moved where ranks share parameters alone"
            yield field, problem, f"{axis} 1, and dp_shard or dp_replicate instead"
    if plan.weights:
        yield "weights", f"the plan has {plan.mesh.world} ranks, and weights come and go on one device alone", "one rank, or states alone"
    if "disk" in plan.states.values():
        yield "states", f"the plan has {plan.mesh.world} ranks, and states go to disk on one device alone", "host"
    if plan.state_format not in _BY_ELEMENT:
        problem = f"is {plan.state_format}, whose elements are kept together, and {plan.mesh.world} ranks cut them apart"
        yield "state_format", problem, f"one of {', '.join(_BY_ELEMENT)}"
    if plan.precision == FLOAT8:
        yield field, f"precision is {FLOAT8}, and its sharded weights are no plain tensors", "bf16-mixed"

"""What one step of a model or a script needs and takes, and what would make it fit."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from foretell.api import backends
from foretell.api.call import asking
from foretell.api.optimizers import optimizer_name
from foretell.api.programs import flops, said
from foretell.api.refused import settled
from foretell.decode import value_of
from foretell.errors import UserError
from foretell.hardware import Cluster, overhead, parse
from foretell.hardware.lookup import profile_stamp
from foretell.hardware.prices import user_figures
from foretell.options import FitOptions
from foretell.options.adapters import adapters_of
from foretell.options.describe import named
from foretell.options.kernels import kernels_of, kernels_told
from foretell.options.sync import sync_of
from foretell.options.words import MAX
from foretell.plan.facts import too_old_to_compile
from foretell.plan.precision import default_recipe, for_inference, refuse_recipe
from foretell.plan.precision import read as read_precision
from foretell.quantities import FITS, Prediction, Remedy
from foretell.simulate.wishes import Amount, RunRequest
from foretell.trace.cuda.versions import choices_of, doubt, of
from foretell.trace.flow.unaligned import unaligned
from foretell.trace.load.model import Source, describe, in_samples
from foretell.trace.load.model import check as check_source
from foretell.trace.recipe import COMPUTES, Recipe
from foretell.trace.record.collection import no_collection
from foretell.trace.sandbox.child import request
from foretell.trace.sandbox.process import TIME_LIMIT
from foretell.trace.store import cache as store
from foretell.units import gib

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from foretell.options.fit import StepOptions
    from foretell.simulate.parts import PlanCost
    from foretell.simulate.plan import Options
    from foretell.trace.types import Trace

ADVICE_SECONDS = 10.0
"""After which `fit` begins no further prediction of ways to make a step fit."""


@asking(FitOptions, also=("batch",))
def fit(model: str | nn.Module, options: FitOptions) -> Prediction:
    """Predict whether one step of a model fits on hardware, who holds the bytes, how long it takes and what it costs.

    `model` is a name (`llama3-8b`, `hf:llama`, `timm:resnet50`, `file.py:function`), traced in a process of its
    own for at most `time_limit` seconds, or a module you already have, on any device, with a `batch` for it; that one is
    traced here and untouched.
    Where it does not fit, or hardly, ways to make it fit are predicted too. No further one is begun after `advice_seconds`,
    10 unless said, or as many as the answer itself took, if that was longer; with 0 none is.
    """
    asked = {**named(options), "model": model, "optimizer": optimizer_name(options.optimizer), "began": time.monotonic()}
    _refuse_idle(model, options)
    hardware, wishes = options.hardware, run_request(asked)
    cluster = hardware if isinstance(hardware, Cluster) else parse(hardware, apple=True)
    on = hardware if isinstance(hardware, str) else cluster.device.name
    recipe = _recipe(asked, cluster)
    if recipe.compile != "none" and too_old_to_compile(cluster):
        raise UserError(f"{cluster.device.name} is too old for torch.compile: Triton needs compute capability 7.0", "leave out --compile")
    if isinstance(model, str):
        if MAX in (options.micro_batch, options.seq):
            return _largest(model, options)
        return _fit_named(asked, cluster, on, wishes)
    answer = _fit_module(model, options.batch, options.loss, recipe, cluster, on, options.hints, options.expandable_segments, wishes)
    return _advised(answer, recipe, cluster, asked)[0]


def _fit_named(asked: dict[str, Any], cluster: Cluster, on: str, wishes: RunRequest) -> Prediction:
    """The answer for a model by name."""
    hints = dict(asked["hints"] or {})

    def attempt(asked: dict[str, Any]) -> _Answered:
        return _fit_source(
            _source(asked), _recipe(asked, cluster), cluster, on, hints, asked["expandable_segments"], asked["cache"], wishes, asked["time_limit"]
        )

    usual = _request(_source(asked), _recipe(asked, cluster), cluster, hints)
    found, asked, told = settled(attempt, asked, {**usual, "free": [asked["precision"], asked["micro_batch"]]}, asked["cache"])
    answer = _kept_advice(found, _recipe(asked, cluster), cluster, asked, _source(asked))
    return replace(answer, assumptions=(*told, *answer.assumptions))


_OF_NAMES = ("micro_batch", "seq", "image", "overrides", "time_limit", "cache")
"""What a module has itself, or is traced without."""


def _refuse_idle(model: Any, options: FitOptions) -> None:
    """Raise where an argument does not apply."""
    if options.keep_writes:
        raise UserError("keep_writes is of a script, and a model is given", "leave it out")
    if isinstance(model, str):
        if options.batch is not None:
            raise UserError("a batch is given with a model's name", "give a module, or let the name make its own batch")
        return
    usual = FitOptions(hardware=options.hardware)
    if idle := [name for name in _OF_NAMES if getattr(options, name) != getattr(usual, name)]:
        raise UserError(f"{idle[0]} is given with a module, which it says nothing of", "leave it out: the module and its batch say it themselves")


def _largest(model: str, options: FitOptions) -> Prediction:
    """The answer for the largest micro-batch, or the longest sequence, that fits, with what the next one lacks among its assumptions."""
    from foretell.search.advice.largest import LONG as FIRST
    from foretell.search.advice.largest import most

    axes = [name for name in ("micro_batch", "seq") if getattr(options, name) == MAX]
    if len(axes) > 1:
        raise UserError("micro_batch and seq both at most have many answers", "give one of them a number")
    (axis,) = axes
    found = most(lambda size: fit(model, **{**named(options), axis: size, "advice_seconds": 0.0}), first=FIRST if axis == "seq" else 1)
    short = "" if found.next_short is None or found.next_short <= 0 else f", which is {gib(found.next_short)} short"
    told = f"{axis} {found.size} is the largest that fits; the next is {found.next_size}{short}" if found.size else f"no {axis} fits"
    told += f"; up to about {found.tight} it runs with less to spare" if found.tight is not None else ""
    return replace(found.answer, assumptions=(*found.answer.assumptions, told))


def run_request(asked: Mapping[str, Any]) -> RunRequest:
    """What else is to be told of the run."""
    amount = Amount.of(**{name: asked[name] for name in ("tokens", "samples", "epochs", "dataset_size")})
    return RunRequest(amount=amount, region=asked["region"], price=asked["price"], trace_out=asked["trace_out"], mtbf=asked.get("mtbf"))


def _recipe(asked: Mapping[str, Any], cluster: Cluster) -> Recipe:
    """How the step is trained, by the options of `fit`."""
    infer, compile = asked["infer"], asked["compile"]
    sync, replicas = sync_of(asked), 1
    if sync is not None:
        replicas = _replicas(cluster, infer, one_process=sync.quorum > 0)
    sharded = cluster.count > replicas and not infer
    same = ("optimizer", "recompute", "accumulate", "clip", "channels_last", "loss_chunks", "state_format")
    plain = {name: asked[name] for name in same}
    usual = for_inference(cluster) if infer else default_recipe(cluster, sharded)
    recipe = Recipe(
        **plain, **adapters_of(asked), precision=read_precision(asked["precision"], sharded) if asked["precision"] else usual,
        kernels=kernels_of(asked["kernels"], cluster, COMPUTES[read_precision(asked["precision"], sharded) if asked["precision"] else usual]),
        freeze=tuple(asked["freeze"]), mode="infer" if infer else "train",
        compile=compile if isinstance(compile, str) else "model" if compile else "none",
        shards=1 if infer else cluster.count // replicas, replicas=replicas, sync=sync,
    )  # fmt: skip
    refuse_recipe(recipe.precision, cluster, sharded)
    if recipe.recompute == "host" and recipe.compile != "none":
        raise UserError("--recompute host moves activations, which compiled code does not allow", "leave out --compile, or --recompute full")
    if recipe.compile != "none":
        backends.refuse_compile(cluster)
    return recipe


def _replicas(cluster: Cluster, infer: bool, *, one_process: bool) -> int:
    """Replicas that step alone where no plan says which: one for each node, or, on one node, one for each device."""
    if infer or cluster.count == 1:
        raise UserError("--sync-every joins replicas, and there is one device" if not infer else "--sync-every is of training, and --infer is given",
                        "name several, such as --on 2x8xH100, or leave it out")  # fmt: skip
    if cluster.groups:
        raise UserError("--sync-every with groups of unlike nodes is not predicted", "equal nodes, such as 2x8xH100")
    return cluster.nodes if cluster.nodes > 1 and not one_process else cluster.count


def _source(asked: Mapping[str, Any]) -> Source:
    plain = {name: asked[name] for name in ("model", "micro_batch", "seq", "image", "loss")}
    plain["micro_batch"] = 1 if plain["micro_batch"] is None else plain["micro_batch"]
    return Source(**plain, overrides=dict(asked["overrides"] or {}))


def trace_ahead(many: Sequence[Mapping[str, Any]], seconds: float) -> None:
    """Trace what `fit` will trace for these options of its, side by side; it finds the traces kept. What cannot be traced it says then."""
    from foretell.trace.fold.phases import by_phase
    from foretell.trace.store.traces import keep_all

    wanted: list[Mapping[str, Any]] = []
    for given in many:
        asked = {**_defaults(), **given}
        cluster = parse(asked["hardware"], apple=True) if isinstance(asked["hardware"], str) else asked["hardware"]
        with suppress(UserError):
            recipe, source = _recipe(asked, cluster), _source(asked)
            wanted += by_phase(_request(source, recipe, cluster, dict(asked["hints"] or {})), recipe).values()
    keep_all(wanted, seconds=seconds, time_limit=min((given.get("time_limit", TIME_LIMIT) for given in many), default=TIME_LIMIT))


def _defaults() -> dict[str, Any]:
    return {name: one.default for name, one in inspect.signature(fit).parameters.items()}


def _request(source: Source, recipe: Recipe, cluster: Cluster, hints: dict[str, float]) -> dict[str, Any]:
    """What is asked of the process that traces."""
    ranks = min(2, recipe.shards)  # a trace is the same for any number of them above one
    several = "+" in str(source.overrides.get("phase", ""))  # phases in turn are traced with all their micro-batches
    recompute = "full" if recipe.recompute == "host" else recipe.recompute
    accumulate = recipe.accumulate if several else 1
    traced = replace(recipe, compile="none", shards=ranks, recompute=recompute, replicas=1, sync=None, accumulate=accumulate)
    return request(source, traced, backends.capability(cluster) or (), hints)


def _fit_module(
    model: nn.Module, batch: Any, loss: Any, recipe: Recipe, cluster: Cluster, on: str, hints: Mapping[str, float] | None, expandable: bool,
    wishes: RunRequest,
) -> Prediction:  # fmt: skip
    from foretell.trace.load.module import batch_size, capture_module

    trace = capture_module(model, batch, loss, replace(recipe, accumulate=1), capability=backends.capability(cluster), hints=hints)
    about = {"source": type(model).__name__, "description": type(model).__name__, "micro_batch": batch_size(batch)}
    return predict(trace, recipe, cluster, about, on=on, expandable_segments=expandable, wishes=wishes)


def _kept_advice(found: _Answered, recipe: Recipe, cluster: Cluster, asked: Mapping[str, Any], source: Source) -> Prediction:
    """The answer with ways to make it fit: those of the last time, unless time was up before one was found that fits."""
    question = {"advice": found.question, "seconds": asked["advice_seconds"], "hardware": str(asked["hardware"])}
    key = store.key_of(question)
    keeps = bool(asked["cache"]) and found.answer.verdict != FITS and asked["advice_seconds"] != 0
    known = store.read("advice", key, lambda entry: value_of(_KeptAdvice, entry["advice"])) if keeps else None
    if known is not None:
        return replace(found.answer, remedies=known.remedies, ways_tried=known.tried, advice=known.words)
    answer, whole = _advised(found.answer, recipe, cluster, asked, source)
    if keeps and (whole or any(one.fits for one in answer.remedies)):
        said = _KeptAdvice(remedies=answer.remedies, tried=answer.ways_tried, words=answer.advice)
        store.write("advice", key, {"advice": asdict(said)}, found.files)
    return answer


@dataclass(frozen=True, kw_only=True)
class _KeptAdvice:
    """What is kept of advice."""

    remedies: tuple[Remedy, ...]
    tried: int
    words: str


@dataclass(frozen=True, kw_only=True)
class _Answered:
    """An answer, what was asked for it, and the user's files that it rests on."""

    answer: Prediction
    question: Mapping[str, Any]
    files: Mapping[str, str]


def _advised(
    answer: Prediction, recipe: Recipe, cluster: Cluster, asked: Mapping[str, Any], source: Source | None = None
) -> tuple[Prediction, bool]:
    """With ways to make it fit, each predicted by `fit` itself, and whether there was time for all."""
    least = ADVICE_SECONDS if asked["advice_seconds"] is None else asked["advice_seconds"]
    if answer.verdict == FITS or least <= 0:
        return answer, True
    from foretell.search.advice.by_plan import by_plan
    from foretell.search.advice.fit import advise
    from foretell.search.advice.ways import FitRequest

    plain = {name: value for name, value in asked.items() if name not in ("began", "model")} | {"advice_seconds": 0.0, "trace_out": None}
    seconds = max(least, time.monotonic() - asked["began"])
    on = asked["hardware"] if isinstance(asked["hardware"], str) else None
    given = FitRequest(
        recipe=recipe, cluster=cluster, on=on, micro_batch=int(answer.model.get("micro_batch") or 1),
        resizable=source is not None, blocks=bool(answer.model.get("blocks")), expandable=asked["expandable_segments"],
    )  # fmt: skip

    def ahead(many: Sequence[Mapping[str, Any]], left: float) -> None:
        trace_ahead([{**plain, "model": asked["model"], **changes} for changes in many], left)

    return advise(
        answer, given, lambda changes: fit(asked["model"], **{**plain, **changes}), seconds=seconds, progress=asked["progress"],
        prepare=lambda many, left: ahead(many, left) if source is not None and asked["cache"] else None,
        by_plan=lambda: by_plan(answer, given, source, hints=asked["hints"] or {}, cache=asked["cache"]),
    )  # fmt: skip


def _fit_source(
    source: Source, recipe: Recipe, cluster: Cluster, on: str, hints: dict[str, float], expandable: bool, cache: bool,
    wishes: RunRequest, time_limit: float,
) -> _Answered:  # fmt: skip
    check_source(source)
    asked = _request(source, recipe, cluster, hints)
    question = {
        "fit": asked, "recipe": recipe.to_json(), "hardware": cluster.to_dict(), "on": on, "expandable": expandable,
        "wishes": wishes.to_json(), "prices": user_figures()[1], "profile": profile_stamp(cluster.device.name),
    }  # fmt: skip
    key = store.key_of(question)
    about = {"source": source.model, "description": describe(source), "micro_batch": source.micro_batch, **_sizes(source)}
    sizes = {name: value for name, value in about.items() if name != "description"}
    same = {"model": {**sizes, "recipe": recipe.to_json()}, "hardware": _hardware(cluster)}
    known = store.read("answers", key, partial(_known_answer, same)) if cache and not wishes.trace_out else None
    if known is not None:
        return _Answered(answer=known[0], question=question, files=known[1])
    trace, files, notes = _traced_in_turn(asked, recipe, cache, time_limit)
    answer = predict(
        trace, recipe, cluster, about, on=on, source=source, notes=tuple(notes), expandable_segments=expandable, wishes=wishes
    )
    if cache:
        store.write("answers", key, {"answer": answer.to_json()}, files)
    return _Answered(answer=answer, question=question, files=files)


@dataclass(frozen=True, kw_only=True)
class _Counted:
    """What an answer says of its model besides what was asked."""

    blocks: tuple[str, ...]
    trainable: int | None
    ops: int
    flops: int
    ops_without_flop_rule: tuple[str, ...]


def _known_answer(same: Mapping[str, Mapping[str, Any]], entry: Mapping[str, Any]) -> tuple[Prediction, Mapping[str, str]]:
    """A stored answer and the files it rests on, if it is one to this question; raises what `cache.read` drops an entry for."""
    found = Prediction.from_json(entry["answer"])
    value_of(_Counted, found.model, "model")
    for part, wanted in same.items():
        said = getattr(found, part)
        if json.loads(json.dumps({**said, **wanted}, default=str)) != said:
            raise ValueError(f"its {part} is another one's")
    return found, value_of(dict[str, str], entry["files"], "files")


def _hardware(cluster: Cluster) -> dict[str, Any]:
    return {
        "name": cluster.device.name, "count": cluster.count, "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node, "verified": cluster.device.verified,
    }  # fmt: skip


def _sizes(source: Source) -> dict[str, Any]:
    return {"seq": source.seq, "image": source.image, "overrides": dict(source.overrides)}


def _traced_in_turn(
    asked: dict[str, Any], recipe: Recipe, cache: bool, time_limit: float
) -> tuple[Trace, Mapping[str, str], Sequence[str]]:
    from foretell.trace.fold.phases import by_phase, in_turn

    found = {phase: _traced(each, cache, time_limit) for phase, each in by_phase(asked, recipe).items()}
    (trace, files, notes), *others = found.values()
    if not others:
        return trace, files, notes
    files = {path: stamp for _, own, _ in found.values() for path, stamp in own.items()}
    return in_turn({phase: made[0] for phase, made in found.items()}), files, [note for *_, own in found.values() for note in own]


def _traced(asked: dict[str, Any], cache: bool, time_limit: float) -> tuple[Trace, Mapping[str, str], Sequence[str]]:
    from foretell.trace.store.traces import traced

    trace, entry = traced(asked, cache=cache, time_limit=time_limit)
    return trace, entry.files, entry.notes


def predict(
    trace: Trace,
    recipe: Recipe,
    cluster: Cluster,
    about: Mapping[str, Any],
    *,
    on: str = "",
    source: Source | None = None,
    notes: tuple[str, ...] = (),
    expandable_segments: bool = False,
    wishes: RunRequest | None = None,
) -> Prediction:
    """The answer for a trace on hardware, by the plan that its recipe stands for; where `source` names the model, that is shown."""
    with no_collection():
        return _predict(trace, recipe, cluster, about, on or cluster.device.name, source, notes, expandable_segments, wishes or RunRequest())


def _predict(
    trace: Trace, recipe: Recipe, cluster: Cluster, about: Mapping[str, Any], on: str, source: Source | None,
    notes: tuple[str, ...], expandable_segments: bool, wishes: RunRequest,
) -> Prediction:  # fmt: skip
    from foretell.lower.spread import mesh_told
    from foretell.plan.default import in_no_plan
    from foretell.plan.file import to_json
    from foretell.simulate.memory.remedies import outlook
    from foretell.simulate.parts import TORCH
    from foretell.simulate.whole import speed
    from foretell.trace.inductor.compiled import breaks

    asked, recipe = recipe, replace(recipe, compile=str(trace.meta.get("compiles", "none"))) if recipe.compile == "none" else recipe
    if recipe.compile != "none" and "backwards" in trace.meta:
        raise UserError("layers that run backward one by one are not what torch.compile takes", "leave --compile away")
    own = mesh_told(trace)  # of a script that spreads itself
    cost, how = _costed(trace, recipe, cluster, int(about.get("micro_batch") or 1), on, source, expandable_segments)
    plan = cost.plan
    found = speed(cost, cluster, how, wishes, cluster.count if recipe.mode == "infer" else 1)
    if wishes.trace_out:
        if cost.timeline is None:
            raise UserError(f"no timeline of {cluster.device.name} to write: its speed is not known", "leave --trace-out away")
        from foretell.report.chrome import write

        write(cost.timeline, wishes.trace_out)
    memory, guess = cost.worst.memory, None
    if cost.verdict != FITS:
        guess = outlook(cost.programs[0], memory, cluster, overhead(cluster.device, TORCH), expandable=expandable_segments)
    local, parameters = cost.programs[0], trace.meta["parameters"]
    assert isinstance(parameters, int)
    return Prediction(
        verdict=cost.verdict,
        plan=to_json(plan) if source is not None and not in_no_plan(recipe) else {},
        model={
            **about, **_described(about, cost.unit), "recipe": asked.to_json(), "blocks": trace.meta.get("blocks", []),
            "trainable": trace.meta.get("trainable"), "ops": sum(len(p.ops) for p in local.programs.values()),
            "flops": flops(local), "ops_without_flop_rule": list(local.ops_without_flop_rule),
            "unaligned": unaligned(trace), "breaks": breaks(trace), **({"outlook": guess.to_json()} if guess else {}),
        },
        hardware=_hardware(cluster),
        parameters=parameters,
        memory=memory,
        time=found.time,
        throughput=found.throughput,
        mfu=found.mfu,
        utilisation=found.utilisation,
        energy=found.energy,
        cost=found.cost,
        run=found.run,
        goodput=found.goodput.to_json() if found.goodput is not None else {},
        rounds=cost.rounds.to_json() if cost.rounds is not None else {},
        assumptions=(
            *_assumptions(recipe, cluster, expandable_segments, of(trace.meta), bool(own)), *cluster.notes, *notes, *found.notes, *said(local),
            *kernels_told(local.meta, cluster, COMPUTES[recipe.precision]),
        ),
        versions=store.versions(),
    )  # fmt: skip


def _costed(
    trace: Trace, recipe: Recipe, cluster: Cluster, micro_batch: int, on: str, source: Source | None, expandable: bool
) -> tuple[PlanCost, Options]:
    from foretell.lower.blocks import KEEP, blocks_of
    from foretell.lower.spread import mesh_told
    from foretell.plan.default import default_plan, mode_of
    from foretell.plan.recipe import model_of
    from foretell.simulate.plan import Options, predict_plan

    blocks = blocks_of(trace)
    named = model_of(source, blocks=blocks) if source is not None else {}
    plan = default_plan(recipe, named, on, micro_batch=micro_batch, blocks=blocks, **mesh_told(trace))
    how = Options(profile_of=backends.profile_of(cluster), expandable=expandable)
    return predict_plan({mode_of(recipe) if blocks else KEEP: trace}, plan, cluster, how), how


def step_cost(model: str, options: StepOptions) -> tuple[PlanCost, Cluster]:
    """What `fit` predicts of a step, with its program and its timeline."""
    asked = {**named(options), "model": model, "optimizer": optimizer_name(options.optimizer)}
    cluster = options.hardware if isinstance(options.hardware, Cluster) else parse(options.hardware)
    source, recipe = _source(asked), _recipe(asked, cluster)
    check_source(source)
    asked_of = _request(source, recipe, cluster, dict(options.hints or {}))
    trace, _, _ = _traced_in_turn(asked_of, recipe, options.cache, options.time_limit)
    return _costed(trace, recipe, cluster, source.micro_batch or 1, cluster.device.name, source, options.expandable_segments)[0], cluster


def _described(about: Mapping[str, Any], unit: str) -> dict[str, Any]:
    return {"description": in_samples(str(about["description"]))} if unit != "tokens" and "description" in about else {}


def _assumptions(recipe: Recipe, cluster: Cluster, expandable: bool, release: str, scripted: bool = False) -> tuple[str, ...]:
    """What the user did not say and the answer rests on; `scripted`: a script says itself how it is spread."""
    precision = {
        "fp32": "fp32 throughout", "tf32": "fp32 with products in TF32", "bf16-autocast": "fp32 weights with bf16 autocast",
        "fp16-autocast": "fp32 weights with fp16 autocast and a gradient scaler", "bf16": "weights and state in bf16",
        "fsdp-bf16": "fp32 shards, bf16 compute", "fsdp-fp16": "fp32 shards, fp16 compute and a gradient scaler",
        "fp16": "weights in fp16",
    }[recipe.precision]  # fmt: skip
    if recipe.mode == "infer":
        precision = precision.removesuffix(" and a gradient scaler").replace("weights and state", "weights")
    how = "torch.compile of the model, loss and optimizer eager" if recipe.compile != "none" else "eager"
    how += ", channels last" if recipe.channels_last else ""
    lines = [f"{how}, {precision}, {recipe.optimizer}, recompute {recipe.recompute}, {_count(recipe.accumulate, 'micro-batch')} a step"]
    lines[0] += f", loss in {recipe.loss_chunks} chunks" if recipe.loss_chunks > 1 else ""
    lines += [f"AdamW's moments in {recipe.state_format}, which changes the maths within bounds"] if recipe.state_format != "fp32" else []
    if recipe.mode == "infer":
        lines = [f"{how}, inference, one forward, {precision}"]
        lines += [f"each of the {cluster.count} devices runs a copy of the model; memory is of one of them"] if cluster.count > 1 else []
    if recipe.shards > 1 and not scripted:
        _, fsdp, dtype = recipe.precision.rpartition("fsdp-")
        policy = f", {dtype} MixedPrecisionPolicy with gradients reduced in fp32" if fsdp else ""
        lines.append(f"no plan given: FSDP2 over all {cluster.count} devices, every block and the root{policy}; numbers are of the worst rank")
    lines += backends.why_not_bf16(recipe, cluster)
    if recipe.shards > 1 and recipe.compile != "none":
        lines.append("torch.compile and sharding together follow the rules of each; the two were never measured together")
    lines.append(backends.assumptions(cluster, expandable, choices_of(release)))
    return (*filter(None, [doubt(release)]), *lines)  # first: a screen may have no room for the others


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}es"

"""`plan` and `load_plan`: the best way to run a model, and plans that were written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.api.call import asking
from foretell.api.optimizers import optimizer_name
from foretell.errors import UserError
from foretell.hardware import Cluster, parse
from foretell.notebook import Displayable
from foretell.options import PlanOptions
from foretell.options.adapters import adapters_of
from foretell.options.kernels import kernels_of
from foretell.options.sync import sync_of
from foretell.plan import file
from foretell.plan.precision import computes_in, default
from foretell.plan.types import Plan
from foretell.trace.load.model import Source
from foretell.trace.load.model import check as check_source
from foretell.units import GIB, MIB, gib, human_bytes, human_seconds

if TYPE_CHECKING:
    from foretell.quantities import Run
    from foretell.search.solve.choose import Candidate, Choice
    from foretell.search.space.constraints import SearchConstraints
    from foretell.simulate.goodput import Goodput


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanAnswer(Displayable):
    """The best plan and what was found beside it; or a plan from a file."""

    model: str
    hardware: str
    plan: Plan | None
    """None where nothing fits: `why` says what uses the memory."""
    run: Run | None = None
    """Hours, money and energy of the whole run, where its tokens were given."""
    goodput: Goodput | None = None
    """The useful share of the time, where a time between failures was given."""
    choice: Choice | None = None
    """What lost and why, the trade-offs, what other hardware would change; None of a plan from a file."""
    path: Path | None = None

    @property
    def fits(self) -> bool:
        return self.plan is not None

    @property
    def why(self) -> str:
        """Why there is no plan; empty where there is one."""
        if self.plan is not None or self.choice is None:
            return ""
        short = self.choice.infeasible
        held = f"; most of it is {short.holders[0].category}" if short is not None and short.holders else ""
        told = f"the nearest plan is {human_bytes(short.bytes_short)} short on {short.device}{held}" if short is not None else ""
        return told or "; ".join(one.why for one in self.choice.reasons) or "no plan was found"

    def save(self, path: str | Path) -> Path:
        """Write the plan as `foretell run` reads it, and what `foretell report` draws beside it."""
        from foretell.report.html import front

        if self.plan is None:
            raise UserError(f"there is no plan to write: {self.why}", "give more or larger devices, or a shorter sequence")
        file.write(self.plan, path)
        if self.choice is not None:
            front.write(front.of_choice(self.choice, self.plan), str(path))
        return Path(path)

    def to_json(self) -> dict[str, Any]:
        """What `foretell plan --json` prints."""
        if self.choice is None:
            return {"plan": file.to_json(self.plan) if self.plan else None, "file": str(self.path) if self.path else None}
        found = as_json(self.choice, str(self.path or ""), self.plan)
        return {**found, "run": None if self.run is None else asdict(self.run), "goodput": None if self.goodput is None else self.goodput.to_json()}

    def headline(self) -> str:
        from foretell.search.solve.choose import told

        if self.plan is None:
            return f"nothing fits for {self.model} on {self.hardware}: {self.why}"
        return f"{self.model} on {self.hardware}: {told(self.plan)}"

    def rows(self) -> Sequence[tuple[str, str]]:
        if self.plan is None:
            return ()
        said = self.plan.predicted
        found = []
        if "memory_bytes" in said:
            found.append(("memory", f"{gib(said['memory_bytes'])} of {gib(said['capacity_bytes'])}"))
        if "step_seconds" in said:
            found.append(("step", f"{said['step_seconds'] * 1e3:,.4g} ms ({said['low_seconds'] * 1e3:,.4g}–{said['high_seconds'] * 1e3:,.4g})"))
        unit = next((name for name in ("tokens", "samples") if f"{name}_per_second" in said), None)
        if unit is not None:
            found.append((f"{unit}/s", f"{said[f'{unit}_per_second']:,.0f}"))
        if self.run is not None:
            money = f", ${self.run.money:,.0f}" if self.run.money is not None else ""
            found.append(("run", f"{human_seconds(self.run.seconds)}{money}"))
        if self.goodput is not None:
            found.append(("goodput", f"{100 * self.goodput.share:.1f} %"))
        return found


@asking(PlanOptions)
def plan(model: str | Sequence[str], options: PlanOptions) -> PlanAnswer:
    """Find the best plan to train a model on hardware.

    `model` is a name as `fit` takes it, or the words of a training script: `["python", "train.py"]`. Nothing is written:
    `PlanAnswer.save` does. Where nothing fits, the answer has no plan and says what uses the memory.
    """
    words = None if isinstance(model, str) else _script(model)
    name = model if isinstance(model, str) else _script_model(model)
    choice, on = _chosen(plan_source(name, options), constraints(options), options, words)
    best = choice.best.plan if choice.best is not None else None
    failing = goodput_of_choice(choice, best, options.mtbf)
    return PlanAnswer(model=name.removeprefix("script:"), hardware=on, plan=best, choice=choice, run=whole_run(best, options.tokens), goodput=failing)


def plan_source(name: str, options: PlanOptions) -> Source:
    """The model that a plan is for; raises what is wrong with the question, before any work."""
    from foretell.search.space.constraints import check
    from foretell.trace.recipe import Recipe

    source = Source(model=name, overrides=dict(options.overrides or {}), seq=options.seq, image=options.image, loss=options.loss)
    check_source(source)
    wishes = constraints(options)
    check(wishes)
    Recipe(optimizer=wishes.optimizer, clip=wishes.clip)
    if options.patience is not None and not options.patience > 0:
        raise UserError(f"--patience is {options.patience:g}", "give seconds above zero")
    return source


def _script(words: Any) -> list[str]:
    from foretell.trace.script.words import parse as parse_words

    if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
        raise UserError(
            f"plan is given a {type(words).__name__}, and plans name their model",
            "give a name, such as file.py:function, or a script's words; `foretell.fit` takes a module",
        )
    parse_words(list(words))
    return list(words)


def _script_model(words: Sequence[str]) -> str:
    from foretell.trace.script.words import model_of

    return model_of(list(words))


def constraints(options: PlanOptions) -> SearchConstraints:
    """What the search is asked for."""
    from foretell.search.space.constraints import SearchConstraints

    trained = adapters_of(vars(options))
    return SearchConstraints(
        global_batch=options.global_batch, precision=options.precision, optimizer=optimizer_name(options.optimizer), clip=options.clip or None,
        compile=(options.compile,) if options.compile else (), objective=options.objective, schedule=options.schedule,
        micro_batch=options.micro_batch, margin=options.margin, tokens=options.tokens, deadline_seconds=options.deadline, budget=options.budget,
        hbm=options.hbm, host=options.host, disk=options.disk or 0, state_format=options.state_format, fixed=options.fixed,
        described=options.described, adapters=trained["adapters"], base=dict(trained["base"]), may_adapt="adapters" in (options.may or ()),
        loss_chunks=options.loss_chunks, kernels=options.kernels or (),
        may_code="int8" in (options.may or ()), sync=sync_of(vars(options)), may_part="sync" in (options.may or ()),
    )  # fmt: skip


def _chosen(source: Source, wishes: SearchConstraints, options: PlanOptions, words: list[str] | None) -> tuple[Choice, str]:
    from foretell.hardware.lookup import find_profile
    from foretell.search.solve.choose import choose
    from foretell.simulate.plan import Options

    own = options.hardware
    on = own if isinstance(own, str) else own.device.name
    cluster, hardware = capped(parse(own) if isinstance(own, str) else own, on, wishes.hbm)
    wishes = replace(wishes, kernels=kernels_of(wishes.kernels, cluster, computes_in(wishes.precision or default(cluster))))
    exact = True if on == "auto" and options.exact is None else options.exact  # the device is here: what will run is replayed op by op first
    how: dict[str, Any] = {
        "exact": exact, "what_if": options.what_if, "patience": options.patience or float("inf"), "by_law": options.step_law,
        "time_limit": options.time_limit, "options": Options(profile_of=find_profile), "cache": options.cache, "progress": options.progress,
    }  # fmt: skip
    if words is not None:
        from foretell.search.solve.scripted import choose_for  # brings torch

        return choose_for(words, cluster, hardware, wishes, **how), on
    return choose(source, cluster, hardware, wishes, **how), on


def capped(cluster: Cluster, on: str, hbm: int | None) -> tuple[Cluster, str]:
    """The hardware with no more memory than may be used of each device, and how a plan names it."""
    if hbm is None:
        return cluster, on
    offers = cluster.device.memory_bytes
    if not 64 * MIB <= hbm <= offers:
        raise UserError(f"--hbm is {gib(hbm)} and {cluster.device.name} offers {gib(offers)}", f"from 64 MiB to {gib(offers)}")
    amount = f"{hbm // MIB}MiB" if hbm % GIB else f"{hbm // GIB}GiB"
    found = cluster.capped(amount, on)
    return found, on if on.endswith((".toml", ".json")) else f"{on},memory={amount}"


def whole_run(saved: Plan | None, tokens: float | None) -> Run | None:
    """Time, money and energy of a run of so many tokens with a plan."""
    if tokens is None or saved is None:
        return None
    said = saved.predicted
    if "samples_per_step" in said:
        raise UserError("the run is given in tokens, but this model's batch has none", "leave out --tokens")
    from foretell.price.energy import planned_run

    return planned_run(tokens, "tokens", said, saved.mesh.world)


def goodput_of_choice(choice: Choice, saved: Plan | None, mtbf: float | None) -> Goodput | None:
    """The useful share of a run with a plan that fails now and then: what its ranks save is counted where the plan was costed op by op."""
    from foretell.simulate.goodput import SAVED, assumed_costs, goodput, rejoin_costs, rejoining

    if mtbf is None or saved is None:
        return None
    said, sync, on = saved.predicted, saved.sync, parse(saved.hardware)
    if sync is not None and sync.quorum:
        known = rejoin_costs(said.get("sync", {}).get("kept_bytes", 0), on, said.get("step_seconds"))
        return rejoining(known, mtbf, replicas=saved.mesh.dp_replicate, quorum=sync.quorum, every=sync.every)
    cost = choice.best.cost if choice.best is not None and choice.best.plan is saved else None
    counted = sum(cost.worst.memory.categories.get(name, 0) for name in SAVED) if cost is not None else said.get("allocated_bytes", 0)
    return goodput(assumed_costs(counted, on, said.get("step_seconds"), saved.mesh.world), mtbf)


def load_plan(path: str | Path) -> PlanAnswer:
    """A plan from its file, as `foretell plan` wrote it."""
    found = file.read(Path(path))
    return PlanAnswer(model=str(found.model["model"]), hardware=found.hardware, plan=found, path=Path(path))


def as_json(choice: Choice, out: str, saved: Plan | None) -> dict[str, Any]:
    """What was found, for programs."""
    from foretell.report.terminal import front
    from foretell.search.solve.choose import told

    def one(candidate: Candidate) -> dict[str, Any]:
        said: Mapping[str, Any] | None = candidate.cost.predicted() if candidate.cost else candidate.plan.predicted or None
        return {"plan": told(candidate.plan), "why": candidate.why, "predicted": said}

    infeasible = choice.infeasible
    return {
        "plan": file.to_json(saved) if saved else None,
        "file": out if saved else None,
        "costed": choice.costed,
        "runners_up": [one(candidate) for candidate in choice.runners_up],
        "dropped": [one(candidate) for candidate in choice.dropped],
        "infeasible": None if infeasible is None else {
            "device": infeasible.device, "bytes_short": infeasible.bytes_short,
            "holders": [{"name": h.name, "category": h.category, "bytes": h.bytes} for h in infeasible.holders],
        },
        "reasons": [{"count": one.count, "why": one.why} for one in choice.reasons],
        "assumptions": list(choice.notes),
        "where": list(choice.where),
        "relaxations": [one.to_json() for one in choice.relaxations],
        "ways_tried": choice.tried,
        "gain": choice.gain or None,
        "step_law": choice.law.to_json() if choice.law is not None else None,
        **(front.content(choice.found) if choice.found is not None else {}),
    }  # fmt: skip



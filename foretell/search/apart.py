"""Plans whose replicas step alone and are joined every so many steps (DiLoCo): tried one by one, and, where plans may change training
and links are slow, offered beside the best that sums gradients in every step."""

from __future__ import annotations

from dataclasses import replace

from foretell.hardware.types import Cluster
from foretell.plan.types import Mesh, Sync
from foretell.search.solve.choice import Choice
from foretell.search.solve.climb import Climb
from foretell.search.solve.found import Candidate
from foretell.search.solve.question import Question
from foretell.simulate.plan import predict_plan
from foretell.trace.recipe import changes_training

STEPS = (20, 50, 100, 200, 500, 1000)
"""Of a round, that are tried where nobody said how many: DiLoCo's authors trained with 50 to 1,000, and 500 as a rule."""
ENOUGH = 0.9
"""Share of the time that replicas should step: rounds are no longer than that takes."""
WORTH = 1.2
"""Times as many samples a second that training in another way must give to be offered."""


def replicas_of(cluster: Cluster) -> tuple[Mesh, ...]:
    """Meshes of replicas that step alone: one for each node, parameters whole or sharded inside; on one node, one for each device."""
    nodes, inside = (cluster.nodes, cluster.devices_per_node) if cluster.nodes > 1 else (cluster.count, 1)
    if cluster.groups or nodes < 2:
        return ()
    return (Mesh(dp_replicate=nodes, dp_shard=inside),)


def apart(question: Question, patience: float) -> Choice:
    """The best plan with the rounds that were asked for."""
    wishes = question.wishes
    fixed = wishes.fixed.get("dp_replicate"), wishes.fixed.get("dp_shard", 1)
    given = (Mesh(dp_replicate=fixed[0], dp_shard=fixed[1]),) if fixed[0] else ()
    meshes = wishes.meshes or given or replicas_of(question.cluster) or (Mesh(dp_replicate=2),)
    return replace(question, wishes=replace(wishes, meshes=meshes)).into(Climb).answer(patience)


def or_apart(found: Choice, question: Question, patience: float) -> Choice:
    """Where links are so slow that it is worth it: replicas that step alone. What was found before is then the next best."""
    meshes, best = replicas_of(question.cluster), found.best
    before = _per_second(best)
    if not meshes or best is None or before is None or question.wishes.fixed:
        return found
    wishes = replace(question.wishes, meshes=meshes, sync=Sync(every=STEPS[0]), may_part=False)
    tried = replace(question, wishes=wishes).into(Climb).answer(patience)
    other = _long_enough(tried.best, question) if tried.best is not None else None
    costed = found.costed + tried.costed
    after = _per_second(other)
    if other is None or other.cost is None or after is None:
        return replace(found, costed=costed, notes=(*found.notes, "no plan whose replicas step alone fits"))
    gain = after / before
    if gain < WORTH:
        return replace(found, costed=costed, notes=(*found.notes, f"replicas that step alone were predicted {gain:.2f} times as fast: not worth it"))
    assert other.plan.sync is not None
    told = f"{changes_training(other.plan.sync)}: {gain:.3g} times as many {other.cost.unit} a second as the best plan that does not"
    why = "sums gradients in every step" if best.plan.mesh.world > 1 else "leaves the other devices idle"
    slower = replace(best, why=f"{1 - 1 / gain:.0%} slower: {why}")
    return Choice(
        best=other, runners_up=(slower, *found.runners_up), dropped=found.dropped, costed=costed, notes=(*found.notes, told), law=found.law,
        gain=told,
    )  # fmt: skip


def _per_second(one: Candidate | None) -> float | None:
    """Tokens, or samples, by the cost or by what was estimated."""
    if one is None:
        return None
    said = (one.plan.predicted.get(f"{unit}_per_second") for unit in ("tokens", "samples"))
    return (one.cost.per_second if one.cost is not None else None) or next((float(value) for value in said if value), None)


def _long_enough(one: Candidate, question: Question) -> Candidate | None:
    """The plan with the shortest rounds in which replicas step most of the time: in fp32 if that will do, else in 8 bits."""
    assert one.cost is not None
    traces = question.traces.of(one.plan, {residency.mode for residency in one.plan.blocks.values()} or {"keep"})
    found: list[tuple[float, Candidate]] = []
    for format in ("fp32", "int8"):
        for every in STEPS:
            plan = one.plan.with_(sync=Sync(every=every, format=format), predicted={})
            cost = predict_plan(traces, plan, question.cluster, question.options)
            if not cost.fits or cost.rounds is None or cost.rounds.share is None:
                continue
            candidate = Candidate(plan=plan.with_(predicted=cost.predicted()), cost=cost)
            if cost.rounds.share >= ENOUGH:
                return candidate
            found.append((cost.rounds.share, candidate))
    return max(found, key=lambda pair: pair[0])[1] if found else None

"""The cheat audit: what shows only over several calls, or when nobody seems to look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from foretell.tune.verify import checks
from foretell.tune.verify.cases import Cases, LoopCases
from foretell.tune.verify.compare import Problem, torch_of
from foretell.tune.verify.draw import FRESH, GRADIENT, OWN, WEIGHTS, TaskCase
from foretell.tune.verify.inside import triton_kernels
from foretell.tune.verify.inside.calls import raw_of
from foretell.tune.verify.process import packed
from foretell.tune.verify.refusal import Refused, Skipped, refuse
from foretell.tune.verify.sides import Answer, ModuleSide, in_guards, rows_of
from foretell.tune.verify.types import HarnessOptions

Ask = Callable[..., tuple[Answer, Problem | None]]
AGAIN = 3
SETTLED_CALLS = 5


@dataclass(frozen=True)
class Suspect:
    """A candidate that was right whenever it was asked once."""

    ask: Ask
    side: ModuleSide
    cases: Cases
    launches: int
    seconds: list[float]

    def right(self, case: TaskCase, check: str, told: str, **how: Any) -> None:
        """Refuse wrong values under the name of the check that they fail."""
        _, wrong = self.ask(case, **how)
        if wrong is not None:
            known = wrong.check in ("values", "accuracy", "nonfinite", "cache")
            raise Refused(check if known else wrong.check, f"{told}: {wrong.text}")


def audited(suspect: Suspect, asked: HarnessOptions) -> str:
    if suspect.cases.random:
        return replays(suspect.side, suspect.cases)
    fresh = list(suspect.cases.of(FRESH))
    (own,) = suspect.cases.of(OWN)
    suspect.right(fresh[0], "cache", "at first")
    for case in (*fresh[1:], own if not suspect.cases.by_kind.get(WEIGHTS) else fresh[0]):
        suspect.right(case, "cache", "new values in the same memory", same=True)
    _held(suspect, fresh)
    for case in (own, *suspect.cases.of(WEIGHTS)):
        suspect.right(case, "stale", "after its weights were changed in place")
    _drift(suspect, asked.repeats)
    _settled(suspect, own)
    _loop(suspect)
    _does_it_itself(suspect, own)
    return f"{asked.repeats} further calls, {len(suspect.cases.loop.looked_at) if suspect.cases.loop else 0} of a loop looked at"


def timed(side: ModuleSide, case: TaskCase) -> list[float]:
    """Seconds of a few calls that are not looked at."""
    found = []
    for _ in range(SETTLED_CALLS):
        side.call(case.question, delayed=False)
        found.append(side.process.seconds)
    return found


def _held(suspect: Suspect, fresh: list[TaskCase]) -> None:
    """Outputs of several calls are all alive, and each is still what it was."""
    for place, case in enumerate(fresh):
        suspect.side.call(in_guards(case.question), hold=place > 0)
    for case, outputs in zip(fresh, suspect.side.again(), strict=True):
        answer = replace(case.eager, outputs=outputs)
        wrong, _ = checks.values(case, answer)
        if wrong is not None:
            raise Refused("reuse", f"after two more calls {wrong.text}")


def _drift(suspect: Suspect, repeats: int) -> None:
    """After many calls it is as right as before, as quick, and holds no more memory."""
    fresh = list(suspect.cases.of(FRESH))
    begun = _memory(suspect)
    for number in range(repeats):
        suspect.side.call(fresh[number % len(fresh)].question, delayed=False)
    size = sum(one.nbytes for one in fresh[0].eager.outputs if one is not None)
    refuse(checks.leak(begun, _memory(suspect), repeats, size))
    suspect.right(fresh[-1], "drift", f"after {repeats} more calls")
    (own,) = suspect.cases.of(OWN)
    if checks.faster_later(suspect.seconds, timed(suspect.side, own)) is not None:
        refuse(_paced_again(suspect, own, repeats))


def _paced_again(suspect: Suspect, own: TaskCase, repeats: int) -> Problem | None:
    """The same in another process: a busy machine is not slow for the same calls twice."""
    with ModuleSide(suspect.side.code, suspect.side.process.setting, watched=False) as side:
        side.call(own.question, delayed=False)
        early = timed(side, own)
        for _ in range(repeats):
            side.call(own.question, delayed=False)
        return checks.faster_later(early, timed(side, own))


def _memory(suspect: Suspect) -> int:
    noted = suspect.side.noted()
    return int(noted["memory"]) or suspect.side.process.resident_bytes()


def _settled(suspect: Suspect, own: TaskCase) -> None:
    """With nothing left to compile it opens, starts and changes nothing."""
    suspect.side.call(own.question)
    refuse(checks.conduct(suspect.side.noted()["noted"], settled=False))
    for _ in range(SETTLED_CALLS):
        suspect.side.call(own.question)
    refuse(checks.conduct(suspect.side.noted()["noted"], settled=True))


def _loop(suspect: Suspect) -> None:
    """Calls as they are timed: no guards, no gradients, no questions between them."""
    loop = suspect.cases.loop
    if loop is None or not loop.looked_at:
        return
    suspect.side.settle(loop.base)
    for mode in ("eager", "graph") if suspect.side.process.setting.on_gpu else ("eager",):
        _looped(suspect, loop, mode)


def _looped(suspect: Suspect, loop: LoopCases, mode: str) -> None:
    """A graph is captured with other inputs than it is replayed with."""
    specs, blobs = packed(loop.base.inputs)
    if mode == "graph":
        asked = {"inputs": specs, "rolls": [roll + 1 for roll in loop.rolls], "mode": mode}
        suspect.side.process.ask("loop", asked, blobs)
        specs, blobs = [], []
    suspect.side.process.ask("loop", {"inputs": specs, "rolls": list(loop.rolls), "mode": mode}, blobs)
    suspect.side.process.ask("go")
    places = list(loop.looked_at)
    found = suspect.side.process.ask("look", {"places": places})
    for place, outputs in zip(places, rows_of(found.header["calls"], found.blobs), strict=True):
        case = loop.looked_at[place]
        wrong, _ = checks.values(case, replace(case.eager, outputs=outputs))
        if wrong is not None:
            raise Refused("audit", f"call {place} of an ordinary loop, {mode}: {wrong.text}")


def _does_it_itself(suspect: Suspect, own: TaskCase) -> None:
    if suspect.launches:
        # Poisoned: memory that was freed could hold the last right answer, and a result that nobody writes would be right by it.
        left_out = suspect.side.call(own.question, "kernels", how=triton_kernels.LEAVE_OUT, poison=True)
        if left_out.outputs and checks.values(own, left_out)[0] is None:
            raise Refused("decoy", "with its kernels left out the answer is as right: something else computes it")
        return
    refuse(checks.passes_through(suspect.side.ops(own.question), suspect.cases.ops))


# ---------------------------------------------------------------- the same question again


def determinism(ask: Ask, cases: Cases) -> str:
    """bitwise, or rounding where bits differ within what is allowed; refused where more than that differs."""
    fresh = list(cases.of(FRESH))
    if cases.random:
        raise Skipped("the reference draws; the audit replays seeds")
    answers = []
    for number in range(AGAIN):
        answer, wrong = ask(fresh[0])
        if wrong is not None:
            raise Refused("determinism", f"right before, and when asked again {wrong.text}")
        answers.append(answer)
        ask(fresh[1 + number % 2])
    return "bitwise" if checks.determinism(answers) else "rounding"


# ---------------------------------------------------------------- tasks that draw


def draws_alike(side: ModuleSide, cases: Cases) -> str:
    """Each output could be one of the reference's draws."""
    for case in cases.of(OWN, WEIGHTS, FRESH):
        sent = case.question
        found = side.call(sent)
        refuse(checks.form(case, found) or checks.inputs_kept(case, sent, found) or checks.late(found))
        refuse(checks.drawn_alike(found.outputs, case.eager.outputs))
    return "drawn as the reference draws"


def replays(side: ModuleSide, cases: Cases) -> str:
    """A seed stands for its draw, another seed for another one."""
    (own,) = cases.of(OWN)
    question = own.question
    first, again = (side.call(question) for _ in range(2))
    if not checks.determinism([first, again]):
        raise Refused("randomness", "the same seed draws otherwise the second time")
    other = side.call(replace(question, seed=(question.seed or 0) + 1))
    if checks.determinism([first, other]):
        raise Refused("randomness", "another seed draws the same")
    return "seeded"


def draws_and_gradients(side: ModuleSide, cases: Cases) -> str:
    """Along its gradient a draw changes as the gradient says, the seed held."""
    cases_of = list(cases.of(GRADIENT))
    if not cases_of:
        raise Skipped("the reference has no gradient")
    case = cases_of[0]
    question = case.question
    found = side.call(question)
    refuse(checks.form(case, found))
    places = question.wanted.inputs if question.wanted is not None else ()
    for place, gradient in zip(places, found.gradients, strict=False):
        if gradient is None:
            raise Refused("gradients", f"input {place} has no gradient")
        along = torch_of(gradient).double()
        size = float(along.square().mean().sqrt()) if along.numel() else 0.0
        if not size:
            raise Refused("gradients", f"the gradient of input {place} is zero")
        direction = raw_of(along / size)
        step = 1e-3
        plus, minus = (_moved(side, case, place, direction, sign * step) for sign in (1, -1))
        refuse(checks.slope(plus, minus, gradient, direction, step, question.cotangents[0]))
    return f"{len(places)} slopes"


def _moved(side: ModuleSide, case: TaskCase, place: int, direction: Any, step: float) -> Any:
    inputs = list(case.question.inputs)
    values = torch_of(inputs[place])
    inputs[place] = raw_of((values.double() + step * torch_of(direction)).to(values.dtype))
    return side.call(replace(case.question, inputs=tuple(inputs), wanted=None, cotangents=())).outputs[0]

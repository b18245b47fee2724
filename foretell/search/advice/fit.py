"""What to do about a step that does not fit, or hardly does: every way is predicted before it is told.

    guesses (simulate.memory.remedies) ─► ways that may be enough (advice_ways), what costs the user least first
      ─► each predicted by `attempt`, the path of the answer itself ─► told with its verdict

Classes of ways: the same mathematics on the same devices, other numerics there, adapters instead of all weights, a plan
that moves states to the host, more devices. The first way that fits ends its class, and one of the first class ends
all. Guesses only leave out what is far from enough: nothing is told that was not predicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from foretell.errors import ForetellError
from foretell.hardware.larger import larger
from foretell.quantities import FITS, NO, TIGHT, Prediction, Remedy
from foretell.search.advice import ways
from foretell.search.advice.ways import Attempt, FitRequest, OptionChange, Prepare
from foretell.units import gib

if TYPE_CHECKING:
    from foretell.simulate.memory.remedies import Outlook

EACH = 3
"""Ways of one class that are predicted until one fits; of more devices, for each number of them."""
NEAR = 0.97
"""A way is predicted if its guess is at most this share of what there is; the strongest of a class up to STRONGEST."""
STRONGEST = 1.3
FAR = 1.5
"""More devices are not predicted if the strongest way with them is guessed to need this many times what there is."""
TIMES = (2, 4, 8, 16, 32, 64)
"""Times as many devices."""
PATIENCE = 4.0
"""Times as long until a first way is found that is enough."""
GAINS = 0.97
"""Twice the devices must at least save the rest of this share of each."""

ByPlan = Callable[[], Remedy | None]
"""Predict a plan for the same step that moves what does not fit; None where none can be made."""
Progress = Callable[[str], None]


def advise(
    answer: Prediction, asked: FitRequest, attempt: Attempt, *, by_plan: ByPlan = lambda: None, seconds: float,
    prepare: Prepare = lambda _, __: None, progress: Progress = lambda _: None,
) -> tuple[Prediction, bool]:  # fmt: skip
    """The answer with ways to make it fit, and whether there was time for all of them; unchanged where it fits.

    No way is begun after so many seconds, or while none is enough, four times as many.
    """
    guess = answer.model.get("outlook")
    if answer.verdict not in (NO, TIGHT) or not isinstance(guess, Mapping) or seconds <= 0:
        return answer, True
    from foretell.simulate.memory.remedies import Outlook

    search = _Advice(answer, asked, attempt, by_plan, Outlook.from_json(guess), seconds, prepare, progress)
    search.run()
    return replace(answer, remedies=search.ranked(), ways_tried=len(search.found), advice=search.words()), not search.late


@dataclass
class _Advice:
    answer: Prediction
    asked: FitRequest
    attempt: Attempt
    by_plan: ByPlan
    outlook: Outlook
    seconds: float
    prepare: Prepare
    progress: Progress
    found: list[Remedy] = field(default_factory=list)
    late: bool = False
    above: float = 1.0
    """Times as much as was guessed, of what did not fit against its guess."""
    began: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        same, numerics = ways.same_maths(self.asked, self.outlook), ways.numerics(self.asked, self.outlook)
        adapters = ways.adapters(self.asked, self.outlook)
        if self._first(same):
            return
        here = self._first(numerics)
        if here and self.answer.verdict == TIGHT:
            return
        if not here:
            self._first(adapters)
        if self.answer.verdict == NO:
            self._moved()
        self._more_devices()
        if not self.found:  # none was near enough to be predicted: say how far off the strongest are, if they are not hopeless
            for way in (*same[-1:], *(numerics or adapters)[-1:]):
                if self.outlook.held(way.options) <= self.answer.memory.capacity_bytes:
                    self._try(way)

    # ------------------------------------------------------------------ trying

    def _over(self) -> bool:
        """Whether the time is up: later where nothing was found yet that is enough."""
        patient = self.answer.verdict == NO and not any(map(self._enough, self.found))
        longest = PATIENCE * self.seconds if patient else self.seconds
        self.late = self.late or (bool(self.found) and time.monotonic() - self.began > longest)
        return self.late

    def _enough(self, remedy: Remedy) -> bool:
        return remedy.verdict == FITS or (remedy.verdict == TIGHT and self.answer.verdict == NO)

    def _guess(self, way: OptionChange, times: int = 1) -> float:
        """Share of what there is, about."""
        changes = {**way.options, "times": times}
        after = self.outlook.after(changes, micro_batch=self.asked.micro_batch, precision=self.asked.recipe.precision)
        return self.above * after / self.answer.memory.capacity_bytes

    def _first(self, given: Sequence[OptionChange]) -> bool:
        """Predict ways of one class until one fits; whether one does."""
        tried = 0
        for number, way in enumerate(given):
            guess = self._guess(way)
            if guess > (STRONGEST if number == len(given) - 1 else NEAR):
                continue
            if tried == EACH or self._over():
                break
            after = next((one for one in given[number + 1 :] if self._guess(one) <= NEAR), None)
            self._ahead([way, after] if after is not None and tried % 2 == 0 else [])
            remedy = self._try(way)
            if remedy is None:
                continue
            if self._enough(remedy):
                return True
            tried += 1
            self.above = max(self.above, self.above * remedy.device_bytes / self.answer.memory.capacity_bytes / guess)
        return False

    def _ahead(self, given: Sequence[OptionChange]) -> None:
        if given:
            self.progress(f"trying {given[0].flag}")
            self.prepare([way.options for way in given], max(0.0, self.seconds - (time.monotonic() - self.began)))

    def _try(self, way: OptionChange) -> Remedy | None:
        """Predict one; None where it cannot be done to this model."""
        self.progress(f"trying {way.flag}")
        try:
            then = self.attempt(way.options)
        except ForetellError:
            return None
        count = int(then.hardware.get("nodes", 1)) * int(then.hardware.get("devices_per_node", 1))
        remedy = Remedy(
            change=way.change, flag=way.flag, saves_bytes=self.answer.memory.device_bytes - then.memory.device_bytes,
            fits=then.fits, costs=way.costs, verdict=then.verdict, device_bytes=then.memory.device_bytes,
            margin_bytes=then.memory.margin_bytes, devices=count, same_maths=way.same_maths,
        )  # fmt: skip
        self.found.append(remedy)
        return remedy

    def _more_devices(self) -> None:
        """The fewest with which it fits: fewer were predicted too, unless weights and states alone are too much for them."""
        held, room = self.outlook.parameters + self.outlook.optimizer, self.answer.memory.capacity_bytes
        if not self.asked.training or self.asked.on is None:
            return
        before = float("inf")
        for times in TIMES:
            spec = larger(self.asked.on, times)
            if spec is None:
                return
            if held / times + self.outlook.beside_many > room:
                continue
            given = ways.spread(self.asked, spec, times, self.outlook)
            near = [way for way in given[:-1] if self._guess(way, times) <= NEAR]
            least = float("inf")
            if self._guess(given[-1], times) > FAR:
                continue
            chosen = [*near[: EACH - 1], given[-1]]
            self._ahead(chosen[:2])
            for way in chosen:
                if self._over():
                    return
                remedy = self._try(way)
                if remedy is not None and self._enough(remedy):
                    return
                least = min(least, remedy.device_bytes if remedy is not None else least)
            if least > GAINS * before or least == float("inf"):
                return  # more of them do not help, or the model cannot be shared at all
            before = least

    def _moved(self) -> None:
        least = self.outlook.without_states(self.asked.micro_batch) / self.answer.memory.capacity_bytes
        if self._over() or least > STRONGEST:
            return
        self.progress("trying a plan that moves states to the host")
        try:
            remedy = self.by_plan()
        except ForetellError:
            remedy = None
        self.found += [remedy] if remedy is not None else []

    # ------------------------------------------------------------------ telling

    def ranked(self) -> tuple[Remedy, ...]:
        """What is enough first, by what it costs the user; then what is tight, then by how little is missing."""
        good = sorted((one for one in self.found if self._enough(one)), key=self._dear)
        rest = sorted((one for one in self.found if not self._enough(one)), key=lambda one: (not one.fits, -one.margin_bytes))
        return (*good, *rest)

    def _dear(self, remedy: Remedy) -> tuple[bool, bool, bool]:
        return remedy.devices > self.asked.cluster.count, not remedy.same_maths, bool(remedy.command)

    def words(self) -> str:
        count = f"{len(self.found)} {'way' if len(self.found) == 1 else 'ways'} tried"
        what = "fits" if self.answer.verdict == NO else "leaves more room"
        if any(map(self._enough, self.found)):
            return ""
        if not self.found and self.outlook.held({}) > self.answer.memory.capacity_bytes:
            held, devices = self.outlook.held({}), "each of these devices" if self.asked.cluster.count > 1 else "this device"
            return f"nothing tried here {what}: {count}; weights and optimizer states alone need {gib(held)} on {devices}"
        more = f"; the {self.seconds:.0f} s for trying were up, run it again to try more" if self.late else ""
        return f"nothing tried here {what}: {count}{more}"

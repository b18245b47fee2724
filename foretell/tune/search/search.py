"""The search: configurations in generations until the budget is spent, then the best beside every baseline.

A reserve of the budget is left for the end. Whatever ends a search early (Ctrl-C, a kill) loses no row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from foretell.errors import UserError
from foretell.tune.clock.statistics import SpeedVerdict
from foretell.tune.search.evolve import Evolution
from foretell.tune.search.kept import KeptRows, KeptWinner, kept_rows, winners_elsewhere
from foretell.tune.search.space import Config, shown
from foretell.tune.search.templates import Template, bucket_of, digest_of, templates_of
from foretell.tune.search.trial import PRUNED, TIMED, TrialResult, Trials, written
from foretell.tune.verify.types import Verdict

RESERVE = 0.4
"""Share of the budget that is left for the best beside every baseline."""
FINALISTS, MOST_VERIFIED = 2, 6
"""Of the best: measured beside every baseline, and looked at by all stages until so many are right."""
QUICK = ("scan", "smoke", "gradients")
"""Stages of a configuration, where each size and format is compiled anew; the first and the best pass all of them."""
_SHAPE_CHECKS = ("shapes",)
Doing = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How long, and where rows are kept."""

    minutes: float = 5.0
    seed: int = 0
    compile: bool = True
    """torch.compile is among the baselines."""
    folder: Path
    machine: dict[str, str] = field(default_factory=dict)
    """Device, driver and versions that a time depends on."""
    again: bool = False
    """Do not start from a winner that was found before."""
    triton: bool = False
    most: int = 0
    """Configurations that are measured at most; 0: by the budget alone."""
    workers: int = 1
    """Configurations that are verified side by side."""


@dataclass(frozen=True, kw_only=True)
class SearchAnswer:
    """What a search found."""

    task: str
    device: str
    template: str
    configurations: int
    """In the template's space."""
    rows: tuple[tuple[Config, TrialResult], ...]
    """What was measured, also before."""
    resumed: int
    config: Config | None
    text: str
    """The best candidate; empty for none."""
    verdict: Verdict | None
    speed: SpeedVerdict | None
    kept: KeptWinner | None = None
    """It was found by an earlier search, and verified again."""
    seconds: float = 0.0
    interrupted: bool = False
    notes: tuple[str, ...] = ()

    @property
    def faster(self) -> bool:
        """Verified, and faster than the best baseline."""
        if self.kept is not None:
            return self.verdict is not None and self.verdict.accepted and self.kept.low > 1
        return self.speed is not None and self.speed.faster

    def to_json(self) -> dict[str, Any]:
        told = {name: getattr(self, name) for name in ("task", "device", "template", "configurations", "resumed", "text", "seconds", "interrupted")}
        return {
            **told, "rows": [{"config": dict(config), **result.to_json()} for config, result in self.rows],
            "config": dict(self.config) if self.config is not None else None, "faster": self.faster,
            "verdict": self.verdict.to_json() if self.verdict is not None else None, "notes": list(self.notes),
            "speed": self.speed.to_json() if self.speed is not None else None, "kept": asdict(self.kept) if self.kept is not None else None,
        }  # fmt: skip


def search(
    trials: Trials, options: SearchOptions, *, template: Template | None = None, doing: Doing = lambda _: None
) -> SearchAnswer:
    """The best configuration of a template, by itself the one that does the task; raises `UserError` where there is none."""
    begun = time.monotonic()
    if template is None:
        (template, *_) = _templates(trials, options)
    with _rows(trials, options, template) as kept:
        found = _Generations(trials, options, template, kept, begun, doing)
        if kept.winner is not None and not options.again and (answer := found.known_winner()) is not None:
            return answer
        return found.run()


def _templates(trials: Trials, options: SearchOptions) -> tuple[Template, ...]:
    found = templates_of(trials.task, trials.shape, on_gpu=trials.setting.on_gpu, triton=options.triton)
    if not found:
        raise UserError(
            f"no template does {trials.task.path}: it has {trials.shape.problem}",
            "--generator URL or COMMAND, or a task of row-wise ops (norms, softmax, activations, gates)",
        )
    return found


def _rows(trials: Trials, options: SearchOptions, template: Template) -> KeptRows:
    question = {
        **options.machine, "op": trials.shape.op, "template": digest_of(template), "shapes": bucket_of(trials.shape),
        "backward": str(trials.timing.backward), "mode": trials.timing.mode,
    }  # fmt: skip
    return kept_rows(options.folder, question, template.space)


@dataclass
class _Generations:
    """One of them."""

    trials: Trials
    options: SearchOptions
    template: Template
    kept: KeptRows
    begun: float
    doing: Doing
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    resumed: int = 0

    def left(self) -> float:
        """Share of the budget."""
        return 1.0 - (time.monotonic() - self.begun) / max(1e-9, 60 * self.options.minutes)

    def known_winner(self) -> SearchAnswer | None:
        """Found before under the same versions on the same device: verified again, and not measured."""
        known = self.kept.winner
        assert known is not None
        self.resumed = len(self.kept.rows)
        self.doing("verifying what an earlier search found")
        text, verdict = self._verified(known.config)
        if verdict.check in _SHAPE_CHECKS and self._guards():
            text, verdict = self._verified(known.config)
        if not verdict.accepted:
            self.notes.append(f"what an earlier search found is refused now ({verdict.check}); searched anew")
            return None
        return self._answer(known.config, text, verdict, None, kept=known)

    def run(self) -> SearchAnswer:
        if not self.options.triton:
            self.notes.append("Triton is not installed: the kernels are plain torch, and none is pruned by compiling it")
        evolution = self._evolution()
        try:
            self._generations(evolution)
        except KeyboardInterrupt:
            self.interrupted = True
        ranked = evolution.ranked
        if not ranked:
            return self._answer(None, "", None, None)
        if self.interrupted:
            return self._answer(ranked[0][1], self.template.text(ranked[0][1]), None, None)
        try:
            return self._finals([config for _, config in ranked[:MOST_VERIFIED]])
        except KeyboardInterrupt:
            self.interrupted = True
            return self._answer(ranked[0][1], self.template.text(ranked[0][1]), None, None)

    def _evolution(self) -> Evolution:
        known = winners_elsewhere(self.options.folder, self.kept.question, self.template.space)
        evolution = Evolution(self.template.space, seed=self.options.seed, known=known)
        self.resumed = len(self.kept.rows)
        for config, result in self.kept.rows.values():
            evolution.tell(config, result.score)
        return evolution

    def _generations(self, evolution: Evolution) -> None:
        first = True
        while self.left() > RESERVE and (generation := evolution.ask()):
            if first:  # by all stages: what holds for one holds for all
                first = False
                result = self._tried(generation[:1])[0]
                if result.check in _SHAPE_CHECKS and self._guards():
                    result = self._tried(generation[:1])[0]
                self._add(evolution, generation.pop(0), result)
            size = self.options.workers
            for start in range(0, len(generation), size):
                some = generation[start : start + size]
                if (self.left() <= RESERVE and evolution.ranked) or self._enough():
                    return
                for config, result in zip(some, self._tried(some, QUICK if self.template.compiles else ()), strict=True):
                    self._add(evolution, config, result)

    def _add(self, evolution: Evolution, config: Config, result: TrialResult) -> None:
        self.kept.add(config, result)
        evolution.tell(config, result.score)

    def _verified(self, config: Config) -> tuple[str, Verdict]:
        text = self.template.text(config)
        return text, self.trials.verified(written(text, self.trials.task.name))

    def _guards(self) -> bool:
        """Decline other widths from here on, where the task has its own as a number somewhere."""
        self.notes.append("the task says its width as a number: the kernel declines other widths")
        found = templates_of(
            self.trials.task, self.trials.shape, on_gpu=self.trials.setting.on_gpu, triton=self.options.triton, guarded=True
        )
        self.template = next((one for one in found if one.name == self.template.name), self.template)
        return bool(found)

    def _enough(self) -> bool:
        return bool(self.options.most) and len(self.kept.rows) >= self.options.most

    def _tried(self, configs: Sequence[Config], stages: Sequence[str] = ()) -> list[TrialResult]:
        best = max((result.speedup for _, result in self.kept.rows.values()), default=0.0)
        self.doing(f"{len(self.kept.rows)} tried" + (f", best {best:.2f}× eager" if best else "") + f"; {shown(configs[0])}")
        hopeless = [self.template.hopeless(config) for config in configs]
        codes = [written(self.template.text(config), self.trials.task.name) for config, why in zip(configs, hopeless, strict=True) if not why]
        found = self.trials.each(codes, prune=self.template.compiles, stages=stages, workers=max(1, len(codes)))
        return [TrialResult(status=PRUNED, reason=why) if why else next(found) for why in hopeless]

    def _finals(self, configs: Sequence[Config]) -> SearchAnswer:
        """The best by all stages and beside every baseline; where it does not win, the next."""
        found: list[SearchAnswer] = []
        judged = 0
        for config in configs:
            self.doing(f"verifying {shown(config)}")
            text, verdict = self._verified(config)
            code = written(text, self.trials.task.name)
            speed = self.trials.judged(code, compile=self.options.compile) if verdict.accepted else None
            judged += verdict.accepted
            found.append(self._answer(config, text, verdict, speed))
            if found[-1].faster:
                self._keep(found[-1])
                break
            if judged == FINALISTS or self.left() < RESERVE / 2:
                break
        return max(found, key=lambda one: (one.faster, one.speed is not None, -found.index(one)))

    def _keep(self, answer: SearchAnswer) -> None:
        """For the next time."""
        assert answer.speed is not None and answer.config is not None
        worst = answer.speed.shapes[0]
        ratio = worst.ratios[worst.best]
        self.kept.end(KeptWinner(config=answer.config, speedup=ratio.speedup, low=ratio.low, beside=worst.best, date=date.today().isoformat()))

    def _answer(
        self, config: Config | None, text: str, verdict: Verdict | None, speed: SpeedVerdict | None, kept: KeptWinner | None = None
    ) -> SearchAnswer:
        rows = sorted(self.kept.rows.values(), key=lambda row: row[1].score or math.inf)
        return SearchAnswer(
            task=self.trials.task.name, device=self.trials.setting.device, template=self.template.name, configurations=self.template.space.size,
            rows=tuple(rows), resumed=self.resumed, config=config, text=text, verdict=verdict, speed=speed, kept=kept,
            seconds=time.monotonic() - self.begun, interrupted=self.interrupted, notes=tuple(self.notes),
        )  # fmt: skip


def timed_rows(answer: SearchAnswer) -> list[tuple[Config, TrialResult]]:
    return [row for row in answer.rows if row[1].status == TIMED]

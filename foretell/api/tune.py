"""What better kernels could gain, and whether a kernel can be trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from foretell.api.call import asking
from foretell.api.step import step_cost
from foretell.errors import UserError
from foretell.options.fit import StepOptions

if TYPE_CHECKING:
    from foretell.tune.clock.statistics import SpeedVerdict
    from foretell.tune.rank import Ranking
    from foretell.tune.verify.types import Verdict


def quiet(doing: str) -> None:
    """No sign of life."""


@asking(StepOptions)
def rank(model: str, options: StepOptions) -> Ranking:
    """A step's ops by what it could gain from kernels that move no byte twice; predicted, as `fit` predicts it."""
    from foretell.tune.rank import rank as ranked

    cost, cluster = step_cost(model, options)
    if cost.timeline is None or cost.time is None:
        raise UserError(f"the speed of {cluster.device.name} is not known", "name a device of `foretell hardware`, or probe this one")
    local, line = cost.programs[0], cost.timeline
    return ranked(local, line.tasks, cost.time.step_seconds, cost.time.waiting_for_host_seconds, cluster.device.memory_bandwidth_bytes_per_second)


@dataclass(frozen=True, kw_only=True)
class KernelAnswer:
    """Whether a kernel is right, and, where that was asked, whether it is faster."""

    verdict: Verdict
    speed: SpeedVerdict | None = None

    @property
    def good(self) -> bool:
        return self.verdict.accepted and (self.speed is None or self.speed.faster)

    def to_json(self) -> dict[str, Any]:
        return {**self.verdict.to_json(), "speed": self.speed.to_json() if self.speed is not None else None}


def verify_kernel(
    file: str, *, reference: str | None = None, device: str = "auto", seed: int | None = None, gradients: bool = True, scan: bool = True,
    time_limit: float = 60.0, bench: bool = False, baselines: tuple[str, ...] = (), progress: Callable[[str], None] = quiet,
) -> KernelAnswer:  # fmt: skip
    """Verify the kernel in `file` (a class ModelNew) against a reference (Model, get_inputs, get_init_inputs), in processes of its own.

    With `bench` a kernel that is accepted is measured beside eager, torch.compile and the kernels in `baselines`.
    """
    from foretell.tune.verify import source
    from foretell.tune.verify.harness import seed_of, verify
    from foretell.tune.verify.types import HarnessOptions

    candidate, known = source.candidate(file), source.reference(reference or file)
    setting = kernel_setting(device, time_limit)
    asked = HarnessOptions(seed=seed, gradients=gradients, scan=scan)
    asked = replace(asked, seed=seed_of(asked))
    verdict = verify(candidate, known, setting, asked, doing=progress)
    if not bench or not verdict.accepted:
        return KernelAnswer(verdict=verdict)
    from foretell.tune.clock.baselines import baselines_of
    from foretell.tune.clock.measure import TimingOptions, own_question, speed

    others = tuple(source.candidate(path) for path in baselines)
    question, size = own_question(known, setting, asked)
    timing = TimingOptions(bandwidth=memory_bandwidth() if setting.on_gpu else 0.0)
    found = speed(candidate, baselines_of(known, others), {"the task's own inputs": (question, size)}, setting, timing, doing=progress)
    return KernelAnswer(verdict=verdict, speed=found)


def try_corpus(*, device: str = "auto", seed: int | None = None) -> Iterator[dict[str, Any]]:
    """Every shipped kernel: what the harness says of it, and whether that is what it must say."""
    from foretell.tune.clock.corpus import refused_by_the_clock
    from foretell.tune.verify import corpus

    setting = kernel_setting(device, 60.0)
    some = corpus.entries()
    for entry in some:
        if missing := entry.missing(setting):
            yield {"kernel": entry.name, "group": entry.group, "number": entry.number, "missing": missing, "as_it_must": False}
    for entry, verdict in corpus.tried(some, setting, seed=seed):
        good, check = corpus.as_it_must(entry, verdict), verdict.check
        if good and entry.check == corpus.BASELINE:
            good, check = refused_by_the_clock(entry, setting, seed), corpus.BASELINE
        yield {
            "kernel": entry.name, "group": entry.group, "number": entry.number, "missing": "", "as_it_must": good, "check": check,
            "reason": verdict.reason, "stage": verdict.stage,
        }  # fmt: skip


def kernel_setting(device: str, time_limit: float) -> Any:
    import torch

    from foretell.tune.verify.process import KernelLimits, KernelSetting

    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"a kernel is verified on cpu or cuda, and '{device}' is asked", "--device cpu or --device cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no CUDA device here", "--device cpu, where Triton kernels are interpreted")
    where = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    return KernelSetting(device=where, limits=KernelLimits(seconds=time_limit, start_seconds=max(120.0, time_limit)))


def memory_bandwidth() -> float:
    """Of the GPU that is here, from the catalogue; 0 where it is not known."""
    import torch

    from foretell.hardware import parse

    try:
        return parse(torch.cuda.get_device_name()).device.memory_bandwidth_bytes_per_second
    except UserError:
        return 0.0

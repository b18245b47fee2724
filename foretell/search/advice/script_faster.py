"""What would make a script faster: each change is made while it is followed again, and costed as the script itself was.

    nothing to follow       torch.compile                                      the same trace, compiled
    a line of the script    fused optimizer, TF32, bf16 autocast, channels-last  followed with that done
    its batch size          twice the samples                                   followed with other arguments or loaders
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from foretell.errors import ForetellError
from foretell.hardware.types import Cluster
from foretell.quantities import FITS, NO
from foretell.search.advice.faster import Advice, Gain, told_apart
from foretell.search.advice.faster_ways import BOUNDED, CHANGES, EXACT, HOST_BOUND, compiles
from foretell.search.advice.gain_range import gain_range
from foretell.search.advice.script_ways import ScriptChange, batch_argument, bf16_words, followed_with, with_value
from foretell.search.traces.followed import Followed, cost, make_ready
from foretell.search.traces.followed import follow as follow_script
from foretell.simulate.parts import PlanCost
from foretell.trace.inductor.compiled import breaks
from foretell.trace.sandbox.child import WORKERS

SECONDS = 10.0
"""After which no further change is begun."""
_NAMES = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "momentum": "SGD"}


@dataclass(frozen=True, kw_only=True)
class SpeedChange:
    """A change to a script's step."""

    change: ScriptChange
    maths: str = EXACT
    compile: str = ""
    """How, where that is the change."""

    @property
    def axis(self) -> str:
        """As faster_ways names it."""
        known = {"autocast": "format", "tf32": "format", "channels_last": "layout", "fused": "optimizer"}
        return "compile" if self.compile else next((known[name] for name in self.change.model if name in known), "batch")


def steps(followed: Followed, cluster: Cluster, plain: PlanCost) -> Iterator[SpeedChange]:
    """All that are legal for this script, what needs no following first."""
    recipe, known, seconds = followed.recipe, cluster.device.peak_flops_per_second, plain.time
    assert seconds is not None
    alone = followed.world == 1
    if recipe.compile == "none" and alone and compiles(cluster, seconds.breakdown, breaks(followed.trace)):
        costs = "minutes of compiling at first"
        yield SpeedChange(change=ScriptChange(words="model = torch.compile(model)", costs=costs), maths=BOUNDED, compile="model")
        if seconds.waiting_for_host_seconds > HOST_BOUND * seconds.step_seconds and recipe.accumulate == 1:
            words = 'model = torch.compile(model, mode="reduce-overhead")'
            yield SpeedChange(change=ScriptChange(words=words, costs=f"{costs}; fixed shapes"), maths=BOUNDED, compile="graphs")
    if followed.script is None or cluster.device.backend == "cpu":
        return
    if recipe.precision == "fp32":
        if "bfloat16" in known:
            yield SpeedChange(change=ScriptChange(words=bf16_words(cluster.device.torch_type), model={"autocast": "bfloat16"}), maths=BOUNDED)
        if "tf32" in known:
            yield _tf32()
    if seconds.breakdown.get("convolution") and alone:
        words = "channels-last: model.to(memory_format=torch.channels_last), and the images"
        yield SpeedChange(change=ScriptChange(words=words, model={"channels_last": True}))
    kind, _, variant = recipe.optimizer.partition("-")
    if kind in _NAMES and variant != "fused" and alone:
        yield SpeedChange(change=ScriptChange(words=f"torch.optim.{_NAMES[kind]}(..., fused=True)", model={"fused": True}))
    yield from _doubled(followed)


def _tf32() -> SpeedChange:
    return SpeedChange(change=ScriptChange(words='torch.set_float32_matmul_precision("high")', model={"tf32": True}), maths=BOUNDED)


def _doubled(followed: Followed) -> Iterator[SpeedChange]:
    script, size = followed.script, followed.micro_batch
    if script is None or followed.recipe.accumulate > 1:
        return
    options = [(str(name), int(value)) for name, value in followed.trace.meta.get("options", [])]  # type: ignore[attr-defined]
    argument, costs = batch_argument(script.arguments, size, options), "fewer, larger optimizer steps"
    if argument is None:
        words = f"a batch size of {2 * size} instead of {size} in the script's DataLoader"
        yield SpeedChange(change=ScriptChange(words=words, costs=costs, model={"batch": [size, 2 * size]}), maths=CHANGES)
    else:
        arguments = with_value(script.arguments, argument, 2 * size)
        yield SpeedChange(change=ScriptChange(words=argument.word(2 * size), costs=costs, arguments=arguments), maths=CHANGES)


@dataclass
class ScriptSpeedSearch:
    """Changes that make a followed script faster on a device, the largest gain first."""

    followed: Followed
    cluster: Cluster
    on: str
    plain: PlanCost
    seconds: float = SECONDS
    follow: Callable[..., Followed] = follow_script
    began: float = field(default_factory=time.monotonic)
    late: bool = False

    def advice(self) -> Advice:
        if self.plain.time is None or self.plain.verdict == NO:
            return Advice(gains=(), joint=None, tried=0, whole=True)
        chosen = list(steps(self.followed, self.cluster, self.plain))
        if any(step.change.model or step.change.arguments is not None for step in chosen):
            make_ready()
        with ThreadPoolExecutor(WORKERS) as pool:
            made = [(step, gain) for step, gain in zip(chosen, pool.map(self._try, chosen), strict=True) if gain is not None]
        gains, unsure = told_apart([(step.axis, gain) for step, gain in made])
        return Advice(gains=gains, joint=None, tried=len(made), whole=not self.late, unsure=unsure)

    def _try(self, step: SpeedChange) -> Gain | None:
        """None where it cannot be done, does not fit, or the time is up."""
        followed, whole = self.followed, self.followed.micro_batch
        try:
            if step.compile:
                followed = replace(followed, recipe=replace(followed.recipe, compile=step.compile))
            elif time.monotonic() - self.began > self.seconds:
                self.late = True
                return None
            else:
                followed = followed_with(followed, self.cluster, step.change, self.follow)
                if "batch" in step.change.model and followed.micro_batch == whole:
                    return None  # its batches come from elsewhere
            made = cost(followed, self.cluster, self.on)
        except ForetellError:
            return None
        if made.time is None or self.plain.time is None or not (made.verdict == FITS or made.verdict == self.plain.verdict):
            return None
        speedup = self.plain.time.step_seconds / made.time.step_seconds * followed.micro_batch / whole
        memory, before = made.worst.memory, self.plain.worst.memory
        low, high = gain_range(self.plain.time, made.time, speedup, step.axis, serial=self.cluster.device.backend == "cpu")
        return Gain(
            change=step.change.words, flag="", code=step.change.words, maths=step.maths, costs=step.change.costs, speedup=speedup, low=low, high=high,
            step_seconds=made.time.step_seconds, per_second=followed.micro_batch * followed.recipe.accumulate / made.time.step_seconds,
            device_bytes=memory.device_bytes, saves_bytes=before.device_bytes - memory.device_bytes, verdict=made.verdict,
        )  # fmt: skip

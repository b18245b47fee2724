"""Between which gains a change is expected to lie: how fast the host is that day, and what of the change is not known exactly.

How fast a host asks differs between machines of one kind, and on one of them by the hour, far more than what a device takes. A step
that waits for its host, before or after a change, gains more on a slow host than on a quick one, so its gain is a range:

    gain = before(pace) / after(pace'), times what the change itself is uncertain by; pace over HOST, pace' near it

The figures below were set on 67 pairs of measured steps on H200s that differ in one option (`benchmarks/results/time.jsonl`,
`compiled.jsonl`, and the half of `corpus.jsonl` that laws may be fitted to), of which the range holds 62, and tried on 49 advised changes
(`advice_gpu.jsonl`), of which it holds 42, and 46 of the quieter tenths of both steps; none that is sure was slower.
"""

from __future__ import annotations

import itertools
import math

from foretell.quantities import MEASURED, Time

HOST = (0.55, 1.25)
"""Factors on the host seconds of a profile between which hosts of H200s were; a profile's host has 1."""
APART = 0.2
"""By how much, in the logarithm, the host seconds of two lists of ops differ from what is predicted; less of lists that are more alike."""
REPLACED = {"compile": 0.20, "layout": 0.15, "format": 0.10}
"""Axis → the same of a change that brings other kernels."""
MOST, PART, LEAST = 0.15, 0.5, 0.04
"""Any other change leaves kernels as they are, more or fewer of them: a part of its gain, within these."""
ASSUMED_TIMES = 1.5
"""How many times as uncertain it all is on a device that was not measured. Assumed."""
WIDE = 1.25
"""High over low, from which a gain is told as a range."""
MEASURE = "may not help here: measure it"


def gain_range(before: Time, after: Time, speedup: float, axis: str, *, serial: bool = False) -> tuple[float, float]:
    """The least and the most that a change gains, of one axis or several ("batch+compile"). `serial`: the host computes itself, so that its
    pace is that of both steps alike."""
    wider = 1.0 if before.provenance == after.provenance == MEASURED else ASSUMED_TIMES
    paces = (1.0,) if serial else tuple(pace**wider for pace in (HOST[0], math.sqrt(math.prod(HOST)), 1.0, HOST[1]))
    alike = abs(math.log(after.host_seconds / before.host_seconds)) if before.host_seconds and after.host_seconds else 0.0
    apart = wider * min(APART, PART * alike)
    plain = speedup * after.step_seconds / before.step_seconds
    gains = [
        math.log(plain * step_at(before, pace) / step_at(after, pace * math.exp(other)))
        for pace, other in itertools.product(paces, (0.0,) if serial else (-apart, 0.0, apart))
    ]
    own = [max(_own(one, gain) for one in axis.split("+")) * wider for gain in gains]
    return math.exp(min(gain - less for gain, less in zip(gains, own, strict=True))), math.exp(max(map(sum, zip(gains, own, strict=True))))


def _own(axis: str, gain: float) -> float:
    return REPLACED.get(axis) or max(LEAST, min(MOST, PART * abs(gain)))


def step_at(time: Time, pace: float) -> float:
    """About the seconds of a step whose host takes so many times as long: what neither device nor host fills stays."""
    busy = max(time.device_seconds, time.host_seconds)
    return max(time.device_seconds, pace * time.host_seconds) + max(0.0, time.step_seconds - busy)

"""The shipped kernel that only the clock refuses: quicker than its task, slower than what anyone would write."""

from __future__ import annotations

from foretell.tune.clock.baselines import baselines_of
from foretell.tune.clock.measure import TimingOptions, own_question, speed
from foretell.tune.clock.statistics import SpeedVerdict
from foretell.tune.verify import corpus, source
from foretell.tune.verify.process import KernelSetting
from foretell.tune.verify.types import HarnessOptions


def clocked(entry: corpus.CorpusEntry, setting: KernelSetting, seed: int | None, *, beside: bool, pairs: int = 12) -> SpeedVerdict:
    """The kernel beside eager alone, or beside the good kernel of its task too."""
    known = corpus.task(entry.task)
    good = tuple(source.candidate(str(one.path)) for one in corpus.entries(corpus.GOOD) if one.name == entry.beside)
    question, size = own_question(known, setting, HarnessOptions(seed=seed))
    baselines = baselines_of(known, good if beside else (), compile=False)
    return speed(source.candidate(str(entry.path)), baselines, {"own": (question, size)}, setting, TimingOptions(pairs=pairs))


def refused_by_the_clock(entry: corpus.CorpusEntry, setting: KernelSetting, seed: int | None) -> bool:
    """Faster than eager, and refused beside the best baseline."""
    return clocked(entry, setting, seed, beside=False).faster and clocked(entry, setting, seed, beside=True).check == corpus.BASELINE

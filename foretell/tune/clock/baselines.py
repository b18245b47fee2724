"""What a kernel has to beat: the best of these counts."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass

from foretell.tune.verify.source import Code

EAGER, COMPILED, TUNED = "eager", "torch.compile", "torch.compile max-autotune-no-cudagraphs"
_MODES = {EAGER: None, COMPILED: "default", TUNED: "max-autotune-no-cudagraphs"}


@dataclass(frozen=True)
class Baseline:
    """A module that is right, and how it is run."""

    name: str
    code: Code
    compiled: str | None = None
    """Mode of torch.compile; "default" for none in particular."""


def baselines_of(reference: Code, others: tuple[Code, ...] = (), *, compile: bool = True) -> tuple[Baseline, ...]:
    """The reference in every way torch runs it, and other kernels for the same task."""
    ways = [name for name, mode in _MODES.items() if mode is None or (compile and can_compile())]
    return (*(Baseline(name, reference, _MODES[name]) for name in ways), *(Baseline(one.name, one) for one in others))


def can_compile() -> bool:
    """Whether torch.compile can be expected to work here: on a GPU it needs Triton, elsewhere a compiler."""
    import shutil

    return sys.platform == "linux" and (importlib.util.find_spec("triton") is not None or shutil.which("g++") is not None)


def liger() -> bool:
    """Whether Liger's kernels are installed: a file that uses them can be given as a further baseline."""
    return importlib.util.find_spec("liger_kernel") is not None

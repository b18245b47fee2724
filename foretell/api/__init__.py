"""The Python API; the commands are thin shells around it. Importing it imports no torch, and a function's module when it is first asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretell.api.advice import advise as advise
    from foretell.api.advice import faster as faster
    from foretell.api.advice import faster_script as faster_script
    from foretell.api.demo import DEMO_MODEL as DEMO_MODEL
    from foretell.api.demo import DemoPlan as DemoPlan
    from foretell.api.demo import demo_pace as demo_pace
    from foretell.api.demo import demo_plan as demo_plan
    from foretell.api.demo import demo_profile as demo_profile
    from foretell.api.demo import paced as paced
    from foretell.api.diffs import DiffQuestion as DiffQuestion
    from foretell.api.diffs import diff as diff
    from foretell.api.machine import Hardware as Hardware
    from foretell.api.machine import Listing as Listing
    from foretell.api.machine import ProbeAnswer as ProbeAnswer
    from foretell.api.machine import add_shared as add_shared
    from foretell.api.machine import beside as beside
    from foretell.api.machine import fit_profile as fit_profile
    from foretell.api.machine import hardware as hardware
    from foretell.api.machine import probe as probe
    from foretell.api.machine import probe_machine as probe_machine
    from foretell.api.machine import share_machine as share_machine
    from foretell.api.machine import zoo as zoo
    from foretell.api.plans import PlanAnswer as PlanAnswer
    from foretell.api.plans import load_plan as load_plan
    from foretell.api.plans import plan as plan
    from foretell.api.proofs import Proof as Proof
    from foretell.api.proofs import prove as prove
    from foretell.api.runs import ReportFile as ReportFile
    from foretell.api.runs import RunAnswer as RunAnswer
    from foretell.api.runs import Verification as Verification
    from foretell.api.runs import compare as compare
    from foretell.api.runs import report as report
    from foretell.api.runs import run as run
    from foretell.api.runs import verify as verify
    from foretell.api.scripts import fit_script as fit_script
    from foretell.api.step import fit as fit
    from foretell.api.step import predict as predict
    from foretell.observe.public import lightning_callback as lightning_callback
    from foretell.observe.public import trainer_callback as trainer_callback
    from foretell.observe.public import watch as watch
    from foretell.prove.check import Check as Check
    from foretell.prove.check import check as check
    from foretell.search.advice.largest import Most as Most
    from foretell.search.advice.largest import most as most

_FROM: dict[str, tuple[str, ...]] = {
    "foretell.api.advice": ("advise", "faster", "faster_script"),
    "foretell.api.demo": ("DEMO_MODEL", "DemoPlan", "demo_pace", "demo_plan", "demo_profile", "paced"),
    "foretell.api.diffs": ("DiffQuestion", "diff"),
    "foretell.api.machine": (
        "Hardware", "Listing", "ProbeAnswer", "add_shared", "beside", "fit_profile", "hardware", "probe", "probe_machine", "share_machine", "zoo",
    ),
    "foretell.api.plans": ("PlanAnswer", "load_plan", "plan"),
    "foretell.api.proofs": ("Proof", "prove"),
    "foretell.api.runs": ("ReportFile", "RunAnswer", "Verification", "compare", "report", "run", "verify"),
    "foretell.api.scripts": ("fit_script",),
    "foretell.api.step": ("fit", "predict"),
    "foretell.observe.public": ("lightning_callback", "trainer_callback", "watch"),
    "foretell.prove.check": ("Check", "check"),
    "foretell.search.advice.largest": ("Most", "most"),
}
"""Module → what is asked of it here, as the type checker reads above."""
_PLACES = {name: module for module, names in _FROM.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'foretell.api' has no attribute '{name}'")
    found = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})

"""What can be asked: every option described once. Pure, no torch.

    options ──▶ cli      flags, their help and how their text is read        (cli/options.py)
            ──▶ api      keyword arguments, their types and defaults         (api/call.py)
            ──▶ schema   names, types and what each one means, for programs  (options/schema.py)

A new option is a new field of one of these classes: the command has its flag, the function its argument, the schema its entry.

    fit.py       FitOptions, AdviseOptions    one step of a model on hardware
    plan.py      PlanOptions                  the search for a plan
    run.py       RunOptions, VerifyOptions    what is done with a plan
    adapters.py  of adapters: for FitOptions and PlanOptions
    machine.py   ProbeOptions, ProveOptions   this machine, measured
    describe.py  how a field says what it is
    words.py     text of a flag as a value: 1T, 30m, layers=4
"""

from __future__ import annotations

from foretell.options.fit import AdviseOptions as AdviseOptions
from foretell.options.fit import FitOptions as FitOptions
from foretell.options.fit import StepOptions as StepOptions
from foretell.options.machine import ProbeOptions as ProbeOptions
from foretell.options.machine import ProveOptions as ProveOptions
from foretell.options.plan import PlanOptions as PlanOptions
from foretell.options.run import RunOptions as RunOptions
from foretell.options.run import VerifyOptions as VerifyOptions

"""The Python API; the commands are thin shells around it. Importing it does not import torch."""

from __future__ import annotations

from foretell.api.advice import advise as advise
from foretell.api.advice import faster as faster
from foretell.api.advice import faster_script as faster_script
from foretell.api.demo import DEMO_MODEL as DEMO_MODEL
from foretell.api.demo import DemoPlan as DemoPlan
from foretell.api.demo import demo_pace as demo_pace
from foretell.api.demo import demo_plan as demo_plan
from foretell.api.demo import demo_profile as demo_profile
from foretell.api.demo import paced as paced
from foretell.api.diff import DiffQuestion as DiffQuestion
from foretell.api.diff import diff as diff
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

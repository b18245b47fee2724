"""Tags that many entries share: what a task is called in full, which science a module is of, and its level.

Levels are those of the MLCommons Science ontology (Hawks et al. 2025, "An MLCommons Scientific Benchmarks Ontology",
arXiv:2511.05614), which puts benchmarks on a scientific, an application and a system level. Which module is on which is our
own reading: scientific, where the model answers a question of a science; system, where the paper is about how something is
trained or run, and the model is only what it is shown on; application, all others.
"""

from __future__ import annotations

from foretell.zoo.entry import Entry

TASKS = {
    "branch": "choosing where a solver branches",
    "cls": "classification",
    "compress": "compression",
    "det": "detection",
    "distill": "distillation",
    "forecast": "forecasting",
    "fuse": "fusion of images",
    "gen": "generation",
    "lm": "language modelling",
    "masked": "restoring what was masked",
    "match": "matching and registration",
    "phase": "phases of a formula's variables",
    "pose": "pose estimation",
    "regress": "regression",
    "render": "rendering",
    "rl": "reinforcement learning",
    "seg": "segmentation",
    "simulate": "simulation",
}
"""Every task by its short name, in words."""

SCIENCES = {
    "allshowers": "physics",
    "fno": "physics",
    "lamarr": "physics",
    "pde": "physics",
    "pic_step": "physics",
    "polar_mae": "physics",
    "protein_sid": "biology",
    "wildlife": "biology",
    "geo": "earth",
    "pansharpen": "earth",
    "gauss_rbf": "mathematics",
    "gcn_branch": "mathematics",
    "neuroback": "mathematics",
}
"""Modules of a science, and which."""

SYSTEM = frozenset({"cafo", "ff", "grpo_roc", "longlora", "mf", "perforated", "pyra", "qlora", "scaling_mlp", "video_rag"})
"""Modules about how something is trained or run."""

LEVELS = ("scientific", "application", "system")


def level_of(module: str) -> str:
    """Scientific, application or system."""
    if module in SCIENCES:
        return "scientific"
    return "system" if module in SYSTEM else "application"


def domains_of(entry: Entry) -> tuple[str, ...]:
    """What it works on and, where it is of a science, which."""
    science = SCIENCES.get(entry.module)
    return (entry.domain, science) if science else (entry.domain,)

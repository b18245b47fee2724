"""Options of what is done with a plan: `run` and `verify`."""

from __future__ import annotations

from dataclasses import dataclass

from foretell.options import words
from foretell.options.describe import option

SUPERVISED = ("max_restarts", "standby", "notice", "elastic", "ranks", "replan")
"""Options of `run` for whoever starts its ranks."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a plan is trained; what is None keeps the run's own, or the usual."""

    data: str | None = option(None, "A folder of text, read as bytes, or a file with data(split); default: the model file's own data(), else its "
                                    "example batch.", metavar="FOLDER|FILE.PY")  # fmt: skip
    steps: int | None = option(None, "Optimizer steps in all; default 100.", metavar="N")
    lr: float | None = option(None, "Peak learning rate; default: the optimizer's usual, adamw 3e-4.", metavar="X")
    schedule: str | None = option(None, "cosine, wsd or constant; default cosine.", metavar="NAME")
    warmup: int | None = option(None, "Warm-up steps; default: a twentieth of the schedule.", metavar="N")
    schedule_steps: int | None = option(None, "Length of the learning-rate schedule; default: --steps of the run when it began. A resumed run keeps "
                                              "it unless this is given.", metavar="N")  # fmt: skip
    eval_every: int | None = option(None, "Steps between evaluations on held-out samples; default: at the end.", metavar="N")
    eval_batches: int | None = option(None, "Evaluation batches; default 16.", metavar="N")
    save_every: int | None = option(None, "Steps between checkpoints; default: at the end.", metavar="N")
    memory_every: int | None = option(None, "Steps between checkpoints in host memory (/dev/shm), and in that of another host where there are "
                                            "several: restarts look there first.", metavar="N")  # fmt: skip
    mtbf: float | None = option(None, "Mean time between failures, e.g. 4h: checkpoints at the interval that minimises lost time.", metavar="TIME",
                                typed=str, read=words.duration("--mtbf", "30m, 4h or 2d"))  # fmt: skip
    keep: int | None = option(None, "Checkpoints to keep; default 2.", metavar="N")
    no_save: bool = option(False, "No checkpoint at all: for measuring.")
    exact: bool = option(False, "Sum gradients in one fixed order: the same bits on any number of replicas (dp_replicate) that divides the "
                                "micro-batches of a step.")  # fmt: skip
    init_from: str | None = option(None, "Weights to begin with: a safetensors file, a Hugging Face folder, a run or a checkpoint.", metavar="PATH")
    init_missing: tuple[str, ...] | None = option(None, "Tensors, or beginnings of their names, that --init-from need not have; with commas.",
                                                  metavar="NAMES", typed=str, read=words.names)  # fmt: skip
    init_adapter: str | None = option(None, "Adapters to begin with: a folder in peft's format.", metavar="FOLDER")
    seed: int | None = option(None, "Seed for initialisation, shuffling and dropout; default 0.", metavar="N")
    log: tuple[str, ...] | None = option(None, "Besides log.jsonl: tensorboard, wandb or both, with a comma.", metavar="NAMES", typed=str,
                                         read=words.names)  # fmt: skip
    workers: int | None = option(None, "Processes that prepare your own samples; default 0.", metavar="N")
    bad_samples: int | None = option(None, "Of your own samples, how many on each rank may raise three times and are set aside, the next one in "
                                           "their place; default 0: the first ends the run.", metavar="N")  # fmt: skip
    bad_steps: int | None = option(None, "How many of any 100 steps may have a loss or gradient that is not a number: they are undone and "
                                         "their samples skipped; one more goes back to a checkpoint. Default 0: the first ends the run.",
                                   metavar="N")  # fmt: skip
    spike: float | None = option(None, "A loss or gradient norm X times the median of the last 100 steps is bad too; default: none is.",
                                 metavar="X")  # fmt: skip
    scratch: str | None = option(None, "On a fast disk, for states and activations that the plan keeps on disk while it runs; default: the run "
                                       "folder.", metavar="FOLDER")  # fmt: skip

    max_restarts: int = option(0, "Start the run again after a fault (a rank killed, hung, crashed or lost), from the newest good checkpoint, so "
                                  "often in a row without getting further.", metavar="N")  # fmt: skip
    standby: bool = option(True, "With --max-restarts: keep no process warm, with torch imported, for quick restarts.", flag="--no-standby",
                           negates=True)  # fmt: skip
    notice: tuple[str, ...] | None = option(None, "Save and leave when this file appears, or this address answers with a notice; with commas.",
                                            metavar="FILE|URL", typed=str, read=words.names)  # fmt: skip
    elastic: bool = option(False, "With --max-restarts: go on with fewer ranks, under a new plan, when one is not back after all its restarts.")
    ranks: str | None = option(None, "With --elastic: a file that says how many ranks there may be now, at most PLAN's; read about once "
                                     "a second.", metavar="FILE")  # fmt: skip
    replan: bool = option(False, "Where steps take for long 20 % more than predicted: plan again with the machine as measured, and go on under a "
                                 "plan that is predicted to be 5 % quicker.")  # fmt: skip
    out: str | None = option(None, "The run folder; default runs/MODEL-DATE.", metavar="FOLDER")
    resume: bool = option(False, "Resume the run in --out exactly where it stopped; PLAN may use another layout.")
    device: str = option("auto", "Where to run.", metavar="auto|cpu|cuda")

    def asked(self) -> dict[str, object]:
        """What was said of the training, by name."""
        apart = {"out", "resume", "device", *SUPERVISED, *(name for name in ("no_save", "exact") if not getattr(self, name))}
        return {name: value for name, value in vars(self).items() if value is not None and name not in apart}


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """How a plan is held against one process."""

    steps: int = option(10, "Optimizer steps whose losses are compared.", metavar="N")
    limit: float = option(120.0, "Longest time that one case may take.", metavar="SECONDS")

"""Checkpoints"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from foretell.eject.pieces.ranks import is_first
from foretell.eject.pieces.scale import SCALER


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that changes: weights and optimizer."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    state["scaler"] = {"scale": SCALER.scale, "good": SCALER.good}  # if: fp16
    return state


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint beside the others, and give it its name when it is whole."""
    target, unfinished = folder / f"step-{step:08d}", folder / "unfinished"
    if is_first():
        shutil.rmtree(unfinished, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    wait()
    dcp.save(state_of(model, optimizer), checkpoint_id=unfinished)
    wait()
    if is_first():
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
    wait()


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take up the newest checkpoint; returns the number of steps that were done."""
    found = sorted(folder.glob("step-*"))
    if not found:
        raise SystemExit(f"there is no checkpoint in {folder}")
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=found[-1])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(found[-1].name.removeprefix("step-"))


def wait() -> None:
    if dist.is_initialized():
        dist.barrier()

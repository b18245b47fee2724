"""Training"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from foretell.eject.pieces.blocks import change_blocks, shard
from foretell.eject.pieces.keep import load, save
from foretell.eject.pieces.model import build_model, example_batch, split_tensors
from foretell.eject.pieces.order import numbers_of
from foretell.eject.pieces.own import OwnSamples, OwnStream
from foretell.eject.pieces.pipeline import Stage, blocks_of, schedule_of
from foretell.eject.pieces.ranks import data_place, is_first, join, pick_device, seed_all, seed_step
from foretell.eject.pieces.scale import SCALER
from foretell.eject.pieces.settings import ACCUMULATE, BLOCKS, CLIP, CUTS, MESH, UNITS
from foretell.eject.pieces.step import (
    backward,
    backward_stages,
    clip_meshes,
    clip_stages,
    learning_rate,
    make_optimizer,
    mean_loss,
    settle,
)
from foretell.eject.pieces.text import Text

STEPS = 100
DATA = None
LEARNING_RATE = 3e-4
SCHEDULE = "cosine"
WARMUP = None
SEED = 0
OUT = "runs/ejected"


def options_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="a folder of text; without it every step sees the example batch")  # if: text
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lr", type=float, default=LEARNING_RATE, help="the peak")
    parser.add_argument("--schedule", choices=("cosine", "wsd", "constant"), default=SCHEDULE)
    parser.add_argument("--warmup", type=int, default=WARMUP, help="steps; default: a twentieth of the run, at most 2000")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, default=Path(OUT), help="folder for log.jsonl and checkpoints")
    parser.add_argument("--save-every", type=int, default=0, metavar="STEPS", help="default: at the end only")
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument("--log-every", type=int, default=10, metavar="STEPS", help="how often losses are read")
    options = parser.parse_args(words)
    if options.warmup is None:
        options.warmup = min(2000, options.steps // 20)
    return options


def make_stages(seed: int, mesh: DeviceMesh, device: torch.device) -> list[Stage]:  # if: pp
    """This rank's stages: stage s is on rank s % pp, every other of them on a model of its own."""
    stages = []
    for index in range(mesh.get_local_rank("pp"), len(CUTS) + 1, MESH["pp"]):
        seed_all(seed)
        model = build_model().train()
        model.to(torch.bfloat16)  # if: bf16
        stage = Stage(model, index, device).to(device)
        change_blocks(model, blocks_of(index))  # if: changed
        blocks = [model.get_submodule(path) for path in blocks_of(index)]  # if: data
        shard(stage, blocks, mesh["dp_replicate", "dp_shard"])  # if: data and hybrid
        shard(stage, blocks, mesh["dp_shard"])  # if: data and not hybrid
        stage.connect()
        stages.append(stage)
    return stages


def moved(batch: Any, device: torch.device) -> Any:
    """A batch on the device."""
    if isinstance(batch, dict):
        return {name: moved(value, device) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(moved(value, device) for value in batch)
    if not isinstance(batch, Tensor):
        return batch
    batch = batch.to(device, non_blocking=True)
    return batch.to(torch.bfloat16) if batch.is_floating_point() else batch  # if: bf16
    return batch  # if: not bf16


class Log:
    """Losses, read from the device now and then, so that it need not wait for the host."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.waiting, self.began = options, list[tuple[int, Tensor, float]](), time.perf_counter()
        if is_first():
            options.out.mkdir(parents=True, exist_ok=True)

    def add(self, step: int, loss: Tensor, rate: float) -> None:
        self.waiting.append((step, loss, rate))
        if step % self.options.log_every == 0 or step == self.options.steps:
            self.read()

    def read(self) -> None:
        rows = [{"step": step, "loss": float(loss), "lr": rate} for step, loss, rate in self.waiting]
        seconds = (time.perf_counter() - self.began) / len(rows)
        self.waiting, self.began = [], time.perf_counter()
        if is_first():
            with (self.options.out / "log.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            last = rows[-1]
            print(f"step {last['step']}/{self.options.steps}  loss {last['loss']:.4f}  {1000 * seconds:.1f} ms", flush=True)
        for row in rows:
            if not math.isfinite(row["loss"]):
                raise SystemExit(f"the loss of step {row['step']} is {row['loss']}")


def main(words: Sequence[str] | None = None) -> None:
    options = options_of(words)
    device = pick_device()
    mesh = join(device)  # if: several
    data_rank, data_ranks = data_place(mesh)  # if: several and ordered
    data_rank, _ = data_place(mesh)  # if: several and not ordered
    data_rank, data_ranks = 0, 1  # if: not several and ordered
    data_rank = 0  # if: not several and not ordered
    seed_all(options.seed)
    model = build_model().train()  # if: not pp
    example = example_batch(model)  # if: example and not pp
    example = example_batch(build_model())  # if: example and pp
    model.to(torch.bfloat16)  # if: bf16 and not pp
    model.to(device)  # if: not pp and (tp or not data)
    split_tensors(model, mesh["tp"])  # if: tp
    change_blocks(model, BLOCKS)  # if: changed and not pp
    model.forward = torch.compile(model.forward)  # if: compile_model
    model.forward = torch.compile(model.forward, mode="reduce-overhead")  # if: compile_graphs
    blocks = [model.get_submodule(path) for path in BLOCKS]  # if: data and not pp and not units
    blocks = [[model.get_submodule(path) for path in unit] for unit in UNITS]  # if: data and not pp and units
    shard(model, blocks, mesh["dp_replicate", "dp_shard"])  # if: data and hybrid and not pp
    shard(model, blocks, mesh["dp_shard"])  # if: data and not hybrid and not pp
    stages = make_stages(options.seed, mesh, device)  # if: pp
    model = nn.ModuleList(stages)  # if: pp
    schedule = schedule_of(stages, mesh, device)  # if: pp
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(parameters)
    SCALER.to(device)  # if: fp16
    samples: Any = Text(options.data, options.seed) if options.data else None  # if: text
    samples = OwnSamples(options.seed)  # if: indexed
    samples = OwnStream()  # if: stream
    done = load(options.out / "checkpoints", model, optimizer) if options.resume else 0
    log = Log(options)
    for step in range(done, options.steps):
        rate = learning_rate(step, peak=options.lr, steps=options.steps, warmup=options.warmup, kind=options.schedule)
        for group in optimizer.param_groups:
            group["lr"] = rate
        seed_step(options.seed, data_rank, step)
        numbers = numbers_of(step, data_rank, data_ranks)  # if: ordered
        batches = [samples.batch(row) if samples else example for row in numbers]  # if: text
        batches = [samples.batch(row) for row in numbers]  # if: indexed or stream
        batches = [example] * ACCUMULATE  # if: not ordered
        batches = [moved(batch, device) for batch in batches]
        loss = backward(model, batches, device)  # if: not pp
        loss = backward_stages(schedule, stages, batches, mesh)  # if: pp
        settle(parameters)  # if: tp
        SCALER.unscale(parameters)  # if: fp16
        nn.utils.clip_grad_norm_(parameters, CLIP)  # if: clip and not pp and not tp
        clip_meshes(parameters)  # if: clip and tp
        clip_stages(model, mesh, device)  # if: clip and pp
        optimizer.step()  # if: not fp16
        SCALER.step(optimizer)  # if: fp16
        optimizer.zero_grad(set_to_none=True)
        log.add(step + 1, mean_loss(loss), rate)  # if: several
        log.add(step + 1, loss, rate)  # if: not several
        last = step + 1 == options.steps
        if not options.no_save and (last or (options.save_every and (step + 1) % options.save_every == 0)):
            save(options.out / "checkpoints", step + 1, model, optimizer)
    if dist.is_initialized():  # if: several
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

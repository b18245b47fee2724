"""Ranks"""

from __future__ import annotations

import hashlib
import os
import random
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from foretell.eject.pieces.settings import MESH


def pick_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def join(device: torch.device) -> DeviceMesh:  # if: several
    """Meet the other processes and form the mesh."""
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    wanted = 1
    for size in MESH.values():
        wanted *= size
    if dist.get_world_size() != wanted:
        raise SystemExit(f"this script is for {wanted} processes: torchrun --nproc-per-node {wanted} {__file__}")
    return init_device_mesh(device.type, tuple(MESH.values()), mesh_dim_names=tuple(MESH))


def data_place(mesh: DeviceMesh) -> tuple[int, int]:  # if: several
    """Which of the ranks that see other samples this is, and how many there are."""
    rank, ranks = 0, 1
    for axis in ("dp_replicate", "dp_shard"):
        if axis in MESH:
            rank, ranks = rank * MESH[axis] + mesh.get_local_rank(axis), ranks * MESH[axis]
    return rank, ranks


def seed_all(seed: int) -> None:
    """Python's, numpy's and torch's generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


def seed_step(seed: int, data_rank: int, step: int) -> None:
    """For dropout and the like: other numbers in every step, and for every rank that sees other samples."""
    digest = hashlib.sha256(f"{seed}/{data_rank}/{step}".encode()).digest()
    seed_all(int.from_bytes(digest[:7], "little"))


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0

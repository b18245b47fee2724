"""Models of science: fields, particles, mixed-integer programs, formulas, scene graphs."""

from __future__ import annotations

from functools import partial

from foretell.zoo.entry import Entry

_pde = partial(
    Entry, paper="RealPDEBench", task="forecast", motif="complex FFT, masked channels",
    trap="complex FFTs and complex products must be counted and priced; not handled: a field split over ranks (FFTs with "
    "all-to-all between them), since a plan has no axis that splits space, and files of paired trajectories",
)  # fmt: skip
_pic = partial(
    Entry, paper="TRIMEG", task="simulate", motif="gather, push and scatter of particles on a mesh",
    trap="scatter with many markers to a node is bound by atomics and has next to no FLOPs: its price is the measured one "
    "of index_add; not handled: markers split over ranks, since a plan has no place for a sum of the charge inside forward",
)  # fmt: skip
_gcn = partial(
    Entry, paper="Distributional MIPLIB", task="branch", motif="bipartite graph, ragged batches, softmax of segments",
    trap="bytes follow the sum of unlike graphs, not their number; not handled: foretell's own placement problems as MPS "
    "files solved with and without the policy, since no solver of programs is at hand and none is written",
)  # fmt: skip
_back = partial(
    Entry, paper="NeuroBack", task="phase", motif="attention over edges by kind, softmax of segments, million nodes",
    trap="memory is linear in nodes and edges, and a CPU under a memory cap needs blocks recomputed; not handled: no CDCL "
    "solver is at hand, so the phases are only written as literals, and no gain of a solver is claimed",
)  # fmt: skip
_reg = partial(
    Entry, paper="SG-Reg", task="match", motif="unrolled Sinkhorn sweeps, topk, SVD outside the gradient",
    trap="memory grows by the same amount with every Sinkhorn sweep, and the SVD is counted; not handled: two agents as two "
    "halves of a plan, since a plan splits nothing by robot; bytes_sent says 66 KB a frame here, the paper 52 KB",
)  # fmt: skip
_TINY_FIELD = {"frames": 8, "image": 32, "width": 16, "depth": 2, "modes": 4, "modes_time": 2}
_FIELD = "at 128x128, 20 frames, as for its FSI data"

ENTRIES = (
    _pde("pde", "pde", {"model": "fno"}, "field", f"FNO over time and space, {_FIELD}", image=128),
    _pde("pde-unet", "pde", {"model": "unet", "width": 64, "depth": 3}, "field", f"U-Net of all frames, {_FIELD}", image=128),
    _pde("pde-deeponet", "pde", {"model": "deeponet", "width": 64}, "field", f"DeepONet, {_FIELD}", image=128),
    _pde(
        "pde-tiny", "pde", {**_TINY_FIELD, "model": "fno"}, "field", "FNO over time and space, test size", image=32, small=True
    ),
    _pde(
        "pde-unet-tiny", "pde", {**_TINY_FIELD, "model": "unet", "width": 24}, "field", "U-Net of all frames, test size",
        image=32, small=True,
    ),
    _pde(
        "pde-deeponet-tiny", "pde", {**_TINY_FIELD, "model": "deeponet", "terms": 64}, "field", "DeepONet, test size",
        image=32, small=True,
    ),
    _pic(
        "pic_step", "pic_step", {}, "particles",
        "4 steps of a million markers on 8 planes of 4,225 nodes; the paper's counts are not in its abstract",
    ),
    _pic(
        "pic_step-tiny", "pic_step", {"particles": 4096, "cells": 16, "planes": 4, "steps": 3, "sweeps": 4}, "particles",
        "3 steps of 4,096 markers, test size", small=True,
    ),
    _gcn(
        "gcn_branch", "gcn_branch", {}, "graph", "Branching policy on set covering with 500 rows, 1,000 columns, ragged batch"
    ),
    _gcn(
        "gcn_branch-tiny", "gcn_branch", {"constraints": 100, "variables": 200, "entries": 4000, "width": 32}, "graph",
        "Branching policy, test size", small=True,
    ),
    _back("neuroback", "neuroback", {}, "graph", "Phases of 200,000 variables in 800,000 clauses, a graph of a million nodes"),
    _back(
        "neuroback-tiny", "neuroback",
        {"variables": 100, "clauses": 400, "width": 32, "heads": 4, "patch": 8, "gin": 2, "graph": 2, "local": 2}, "graph",
        "Phases of 100 variables in 400 clauses, test size", small=True,
    ),
    _reg("sg_reg", "sg_reg", {}, "scene", "Scene graphs of 64 nodes with 256 points each, 100 Sinkhorn sweeps"),
    _reg(
        "sg_reg-tiny", "sg_reg",
        {"nodes": 16, "points": 40, "triplets": 8, "semantic": 48, "dim": 32, "pairs": 6, "sweeps": 10}, "scene",
        "Scene graphs of 16 nodes with 40 points each, 10 sweeps, test size", small=True,
    ),
)  # fmt: skip

"""Settings"""

from __future__ import annotations

BLOCKS: list[str] = []  # if: blocks
RECOMPUTE: list[str] = []  # if: full
SELECTIVE: list[str] = []  # if: selective
# The block that begins each stage after the first.
CUTS: list[str] = []  # if: pp
# Layers beside the blocks: the stages that have them, and the width of a row where it is a table.
LAYERS: dict[str, tuple[list[int], int | None]] = {}  # if: pp
# Weights that the first and the last stage both use.
TIED: list[str] = []  # if: tied
# Blocks that are gathered together.
UNITS: list[list[str]] = []  # if: units
# Ranks along each axis of the mesh, the outermost first.
MESH = {"dp_shard": 1}  # if: several
# Whether blocks give their parameters back after forward; a number: to groups of so many ranks.
RESHARD: bool | int = True  # if: data
MICRO_BATCH = 1  # samples of one forward and backward on one data rank
ACCUMULATE = 1  # micro-batches of one optimizer step on one data rank
SEQ = 0  # if: text
CLIP = 1.0  # if: clip

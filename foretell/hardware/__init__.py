"""Hardware: devices and clusters, from a name, this machine or a file.

    parse("2x8xH100")      → Cluster: what a user writes after --on
    find("H100")           → Device, out of `catalog/*.toml`
    overhead(device, "2.11.0") → memory taken beside the model
    load / save            → hardware files

Every figure carries its source; a source that begins with "assumed" is a guess. Nothing here
imports torch, except `auto` when it looks at this machine.
"""

from foretell.hardware.catalog import devices, find
from foretell.hardware.files import load, save
from foretell.hardware.overheads import overhead
from foretell.hardware.parse import parse
from foretell.hardware.this_machine import this_machine
from foretell.hardware.types import Cluster, Device, Overhead

__all__ = ["Cluster", "Device", "Overhead", "devices", "find", "load", "overhead", "parse", "save", "this_machine"]

"""Hardware: devices and clusters, from a name, this machine or a file.

    parse("2x8xH100")      → Cluster: what a user writes after --on
    find("H100")           → Device, out of `catalog/*.toml`
    overhead(device, "2.11.0") → memory taken beside the model
    generations, reached   → what kernels and messages reach of the rates, by generation and link
    load / save            → hardware files
    price_per_hour(device), carbon_g_per_kwh("FR"), footprint(device) → money and planet

Every figure carries its source; a source that begins with "assumed" is a guess. Nothing here
imports torch, except "auto" when it looks at this machine.
"""

from foretell.hardware.catalog import devices, find
from foretell.hardware.files import load, save
from foretell.hardware.footprint import Footprint, footprint
from foretell.hardware.links import link
from foretell.hardware.overheads import Overhead, overhead
from foretell.hardware.parse import parse
from foretell.hardware.prices import carbon_g_per_kwh, carbon_of, price_per_hour, pue
from foretell.hardware.this_machine import this_machine
from foretell.hardware.types import Cluster, Device, Link, Tier

__all__ = [
    "Cluster", "Device", "Footprint", "Link", "Overhead", "Tier", "carbon_g_per_kwh", "carbon_of", "devices", "find",
    "footprint", "link", "load", "overhead", "parse", "price_per_hour", "pue", "save", "this_machine",
]  # fmt: skip

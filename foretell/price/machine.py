"""What is known of a device's speed and power: its own profile, or the nearest one's carried over."""

from __future__ import annotations

from foretell.errors import FileFormatError
from foretell.hardware.profile import Profile
from foretell.hardware.types import Device
from foretell.price import bands
from foretell.price.analytic import DEVICES, FAMILIES, family
from foretell.price.energy import PowerModel, usual
from foretell.price.host import START, HostModel
from foretell.price.kernels.ops import OpModel
from foretell.price.time import COMPUTE_KINDS, Machine
from foretell.quantities import ASSUMED, MEASURED

FAMILIAR = ("ampere", "hopper")
"""Generations whose efficiencies published runs of several sources confirm."""


def _slower(device: Device) -> dict[str, float]:
    """How much longer ops take on a device than an H200's efficiencies at the catalogue's rates would say: what large
    products and copies reach of those rates on its generation, and what its own clocks make of that."""
    reference, kin = FAMILIES["hopper"], FAMILIES[family(device)]
    clocks = DEVICES[device.name].product if device.name in DEVICES else 1.0
    product = reference.product / (kin.product * clocks)
    return dict.fromkeys(COMPUTE_KINDS, product) | {"stream": reference.stream / kin.stream}


def machine(device: Device, profile: Profile | None) -> Machine | None:
    """Speed and power of a device from a profile; None where there is none to carry over. Made once for each pair."""
    if profile is None or not profile.ops:
        return None
    corrected = repr((profile.fitted.get("in_step"), profile.host))  # by runs: the same probe, other factors
    key = (repr(device), profile.device, profile.date, profile.torch, profile.mode, corrected)
    if key not in _KNOWN:
        try:
            _KNOWN[key] = _made(device, profile)
        except FileFormatError as error:
            which = f"the profile of {profile.device} of {profile.date} is damaged"
            raise FileFormatError(f"{which}: {error.problem}", "delete it, or measure it again with `foretell probe`") from None
    return _KNOWN[key]


_KNOWN: dict[tuple[str, ...], Machine] = {}


def _made(device: Device, profile: Profile) -> Machine:
    own = profile.device == device.name
    host = HostModel.from_dict(profile.host) if profile.host else HostModel(dict(START), {})
    in_step = dict(profile.fitted.get("in_step", {}))
    power = PowerModel.from_dict(profile.fitted["power"]) if own and "power" in profile.fitted else usual(device)
    where = f"measured on {profile.device} with torch {profile.torch}, {profile.date[:10]}"
    slower = {} if own else _slower(device)
    notes = (f"seconds of ops and host: {where}",) if own else (
        f"no profile of {device.name}: its rates are the catalogue's, efficiency and host are carried over "
        f"from {profile.device}; `foretell probe` on the machine itself measures them",
    )  # fmt: skip
    known_by = _known_by(device, own)
    return Machine(
        ops=OpModel.from_dict(device, profile.ops), host=host, in_step=in_step, power=power,
        provenance=MEASURED if own else ASSUMED, serial=device.backend == "cpu", slower=slower, notes=notes, known_by=known_by,
        band=bands.by_bottleneck(known_by),
    )  # fmt: skip


def _known_by(device: Device, own: bool) -> str:
    """What the bands of a device's step times rest on."""
    if device.backend == "cpu":
        return bands.CPU if own else bands.UNFAMILIAR
    if own:
        return bands.OWN
    return bands.CATALOGUE if family(device) in FAMILIAR else bands.UNFAMILIAR

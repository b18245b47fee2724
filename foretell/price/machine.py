"""What is known of a device's speed and power: its own profile, or the nearest one's carried over."""

from __future__ import annotations

from foretell.errors import FileFormatError
from foretell.hardware.profile import Profile
from foretell.hardware.types import Device
from foretell.price.analytic import DEVICES, FAMILIES, family
from foretell.price.energy import PowerModel, usual
from foretell.price.host import START, HostModel
from foretell.price.kernels.ops import OpModel
from foretell.price.time import COMPUTE_KINDS, Machine
from foretell.quantities import ASSUMED, MEASURED

BANDS = {
    "compute": (0.87, 1.20), "memory bandwidth": (0.86, 1.20), "host": (0.78, 1.48), "network": (0.75, 1.35),
    "": (0.80, 1.3),
}  # fmt: skip
"""What binds → between which factors of the prediction nine of ten measured steps fell (benchmarks/results/time.jsonl)."""
CARRIED = {"compute": (0.75, 1.35), "host": (0.6, 1.7), "": (0.7, 1.45)}
"""The same where efficiencies come from another device: assumed."""


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
    return Machine(
        ops=OpModel.from_dict(device, profile.ops), host=host, in_step=in_step, power=power,
        provenance=MEASURED if own else ASSUMED, serial=device.backend == "cpu", slower=slower, band=BANDS if own else CARRIED, notes=notes,
    )  # fmt: skip

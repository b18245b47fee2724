"""What is known of a device's speed and power: its own profile, or the nearest one's carried over."""

from __future__ import annotations

from foretell.errors import FileFormatError
from foretell.hardware import catalog
from foretell.hardware.generations import reference
from foretell.hardware.profile import Profile
from foretell.hardware.types import Device
from foretell.price import bands
from foretell.price.analytic import FAMILIES, family
from foretell.price.calibrate.kin import fewer_watts, held_back
from foretell.price.clocks import Clocks
from foretell.price.energy import PowerModel, usual
from foretell.price.host import START, HostModel
from foretell.price.kernels.ops import OpModel
from foretell.price.time import COMPUTE_KINDS, Machine
from foretell.quantities import ASSUMED, MEASURED


def _slower(device: Device, profile: Profile) -> dict[str, float]:
    """How much longer ops take on a device than an H200's efficiencies at the catalogue's rates would say: what large
    products and copies reach of those rates on its generation. Kernels measured elsewhere say so themselves."""
    fitted, kin = FAMILIES[family(reference())], FAMILIES[family(device)]
    if device.name == profile.device or device.backend == "cpu" or _clocks(device, profile, own=False) is not None:
        held = 1.0
    else:
        held = held_back(device, catalog.find(profile.device))
    if device.backend == profile.backend == "cpu":
        return {}  # efficiencies of another CPU
    shown = {"gemm"} if "16-bit" in profile.elsewhere.get("groups", {}) else set()
    shown |= {"attention"} if "flash-2" in profile.elsewhere.get("groups", {}) else set()
    compute = dict.fromkeys(COMPUTE_KINDS, held * fitted.product / kin.product) | dict.fromkeys(shown, held)
    return compute | {"stream": fitted.stream / kin.stream}


def _clocks(device: Device, profile: Profile, own: bool) -> Clocks | None:
    """The clock under load: as the profile has it; a board of the same generation with fewer watts for a FLOP falls as much lower."""
    held = profile.fitted.get("clocks") if own or FAMILIES[family(device)].hot else None
    if not held:
        return None
    known = Clocks.from_dict(held)
    return known if own else known.at(max(1.0, fewer_watts(device, catalog.find(profile.device))))


def machine(device: Device, profile: Profile | None) -> Machine | None:
    """Speed and power of a device from a profile; None where there is none to carry over. Made once for each pair."""
    if profile is None or not profile.ops:
        return None
    corrected = repr((profile.fitted.get("in_step"), profile.fitted.get("clocks"), profile.host))  # by runs: the same probe, other factors
    key = (repr(device), profile.device, profile.date, profile.torch, profile.mode, corrected, str(profile.shared.get("words")))
    if key not in _KNOWN:
        try:
            _KNOWN[key] = _made(device, profile)
        except FileFormatError as error:
            which = f"the profile of {profile.device} of {profile.date} is damaged"
            raise FileFormatError(f"{which}: {error.problem}", "delete it, or measure it again with `foretell probe`") from None
    return _KNOWN[key]


_KNOWN: dict[tuple[str, ...], Machine] = {}


def _made(device: Device, profile: Profile) -> Machine:
    own, told = profile.device == device.name and not profile.elsewhere, profile.elsewhere
    host = HostModel.from_dict(profile.host) if profile.host else HostModel(dict(START), {})
    in_step = dict(profile.fitted.get("in_step", {}))
    power = PowerModel.from_dict(profile.fitted["power"]) if own and "power" in profile.fitted else usual(device)
    where = f"measured on {profile.device} with torch {profile.torch}, {profile.date[:10]}"
    slower = {} if own else _slower(device, profile)
    notes = (f"seconds of ops and host: {where}",) if own else _carried(device, profile)
    if own and profile.shared:
        notes = (f"seconds of ops and host: {profile.shared['words']}", *filter(None, [profile.shared["contradiction"]]))
    known_by = _known_by(device, own)
    spread = (float(profile.shared.get("low", 1.0)), float(profile.shared.get("high", 1.0)))
    return Machine(
        ops=OpModel.from_dict(device, profile.ops, told.get("groups")), host=host, in_step=in_step, power=power,
        clocks=_clocks(device, profile, own),
        provenance=MEASURED if own else ASSUMED, serial=device.backend == "cpu", slower=slower, notes=notes, known_by=known_by,
        spread=spread, band={binds: (low * spread[0], high * spread[1]) for binds, (low, high) in bands.by_bottleneck(known_by).items()},
    )  # fmt: skip


def _carried(device: Device, profile: Profile) -> tuple[str, ...]:
    """Where the speed of a device comes from that was not probed."""
    told = profile.elsewhere
    if not told:
        return (
            f"no profile of {device.name}: its rates are the catalogue's, efficiency and host are carried over "
            f"from {profile.device}; `foretell probe` on the machine itself measures them",
        )
    like = "" if profile.device == device.name else f" of {profile.device}, at the catalogue's rates of {device.name}"
    return (
        f"products{' and attention' if 'flash-2' in told['groups'] else ''}{like}: measured elsewhere ({told['source']}, {told['date']}); "
        f"other ops and host are carried over from {told['basis']}; `foretell probe` on the machine itself measures them",
    )


def _known_by(device: Device, own: bool) -> str:
    """What the bands of a device's step times rest on."""
    if device.backend == "cpu":
        return bands.CPU if own else bands.UNFAMILIAR
    if own:
        return bands.OWN
    return bands.CATALOGUE if FAMILIES[family(device)].confirmed else bands.UNFAMILIAR

"""Money and carbon: what a device costs an hour, and what a kWh emits.

    price_per_hour(find("H100"))  → (3.99, "assumed: Lambda, 8x H100 SXM5, list price of 2026-08-22; ...")
    carbon_g_per_kwh("FR")        → (56.0, "Ember, yearly electricity data, 2023")

The user's own figures go before the catalogue's: first a hardware file's, then those of the file
FORETELL_PRICES names, or else of `~/.config/foretell/prices.toml`:

    region = "FR"
    [dollars_per_hour]
    H100 = 2.10
    [carbon_g_per_kwh]
    default = 30
    FR = 40
"""

from __future__ import annotations

import os
import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from foretell.errors import FileFormatError, UnknownName, UserError
from foretell.hardware.catalog import find, normalise
from foretell.hardware.types import Cluster, Device

WORLD = "world"
_FIELDS = ("region", "dollars_per_hour", "carbon_g_per_kwh", "pue")


def price_per_hour(device: Device) -> tuple[float | None, str]:
    """US dollars for one device and one hour, and where that figure comes from; None where nobody sells it."""
    if device.price_per_hour is not None:
        return device.price_per_hour, device.sources.get("price_per_hour", "given with the hardware")
    path, mine = user_figures()
    for name, price in mine["dollars_per_hour"].items():
        if find(name).name == device.name:
            return price, f"your price, from {path}"
    row = next((row for row in _catalogue("prices")["price"] if device.name in row["devices"]), None)
    if row is None:
        return None, f"no price of {device.name} is known; give one as [dollars_per_hour] in FORETELL_PRICES=FILE"
    price = row["dollars_per_hour"] if "dollars_per_hour" in row else row["dollars_per_core_hour"] * device.sm_count
    return price, f"assumed: {row['source']}; list price of {_catalogue('prices')['date']}, yours may differ"


def carbon_g_per_kwh(region: str | None = None) -> tuple[float, str]:
    """Grams of CO2 equivalent for one kWh in a region; without one the user's default, else the world's mean."""
    path, mine = user_figures()
    own = mine["carbon_g_per_kwh"]
    if region is None and "default" in own:
        return own["default"], f"your figure, from {path}"
    assumed = "assumed: " if region is None and mine["region"] is None else ""
    row = _region(region or mine["region"] or WORLD)
    for name, grams in own.items():
        if name != "default" and _region(name) is row:
            return grams, f"your figure for {row['name']}, from {path}"
    source = row.get("source", _catalogue("carbon")["source"])
    return row["g_per_kwh"], f"{assumed}{row['name']}, {row['year']}: {source}"


def carbon_of(cluster: Cluster) -> tuple[float, str]:
    """Grams of CO2 equivalent for one kWh where a cluster stands."""
    if cluster.carbon_g_per_kwh is not None:
        return cluster.carbon_g_per_kwh, "given with the hardware"
    return carbon_g_per_kwh(cluster.region)


def pue() -> tuple[float, str]:
    """Watts the building draws for each watt of its machines."""
    path, mine = user_figures()
    if mine["pue"] is not None:
        return mine["pue"], f"your figure, from {path}"
    return _catalogue("carbon")["pue"]["value"], _catalogue("carbon")["pue"]["source"]


def user_file() -> Path | None:
    """The file with the user's own figures, if there is one."""
    named = os.environ.get("FORETELL_PRICES", "").strip()
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CONFIG_HOME", "").strip()
    try:
        path = (Path(base) if base else Path.home() / ".config") / "foretell" / "prices.toml"
        return path if path.is_file() else None
    except (OSError, RuntimeError):  # no home, or one that may not be read
        return None


def user_figures() -> tuple[Path | None, dict[str, Any]]:
    """The user's file and its checked figures; empty tables where there is none."""
    path = user_file()
    return path, _checked(_read(path), path) if path else _checked({}, None)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        remedy = "point FORETELL_PRICES at a .toml file, or unset it"
        raise UserError(f"cannot read the prices '{path}': {error.strerror}", remedy) from None
    except ValueError as error:
        raise FileFormatError(f"'{path}' is not TOML: {str(error).splitlines()[0]}", "correct it") from None


def _checked(data: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """The figures of a user's file; what is wrong with them is one error that names all."""
    faults = [f"unknown field '{name}'" for name in data if name not in _FIELDS]
    tables: dict[str, dict[str, float]] = {}
    for title in ("dollars_per_hour", "carbon_g_per_kwh"):
        found = data.get(title, {})
        tables[title] = found if isinstance(found, dict) else {}
        if not isinstance(found, dict):
            faults.append(f"'{title}' is {found!r}, not a table")
        for name, value in tables[title].items():
            if not _number(value, zero=True):
                faults.append(f"'{title}.{name}' is {value!r}, not a number of at least 0")
    region, factor = data.get("region"), data.get("pue")
    if factor is not None and (not _number(factor) or factor < 1):
        faults.append(f"'pue' is {factor!r}, not a number of at least 1")
    if region is not None and not isinstance(region, str):
        faults.append(f"'region' is {region!r}, not a name")
        region = None
    for check, names in ((find, tables["dollars_per_hour"]), (_region, [region] if region else [])):
        faults += _unknown(check, names)
    faults += _unknown(_region, [name for name in tables["carbon_g_per_kwh"] if name != "default"])
    if faults:
        raise UserError(f"{path}: {'; '.join(faults)}", f"a prices file has {', '.join(_FIELDS)}")
    return {**tables, "region": region, "pue": factor}


def _unknown(check: Any, names: Any) -> list[str]:
    faults = []
    for name in names:
        try:
            check(name)
        except UnknownName as error:
            faults.append(error.problem + (f" ({', '.join(error.near)}?)" if error.near else ""))
    return faults


def _number(value: object, *, zero: bool = False) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value < 1e30 or (zero and value == 0)


def _region(name: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = _catalogue("carbon")["region"]
    for row in rows:
        if normalise(name) in map(normalise, (row["name"], *row.get("aliases", ()))):
            return row
    raise UnknownName("region", name, [alias for row in rows for alias in (row["name"], *row.get("aliases", ()))])


@cache
def _catalogue(name: str) -> dict[str, Any]:
    text = (resources.files("foretell.hardware") / "catalog" / f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)

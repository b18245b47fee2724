"""Money, carbon and footprint: published figures, whose figure goes first, and files that are wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from foretell.errors import FileFormatError, UnknownName, UserError
from foretell.hardware import carbon_g_per_kwh, carbon_of, devices, find, footprint, load, parse, price_per_hour, pue
from foretell.hardware.prices import _catalogue


@pytest.fixture(autouse=True)
def _nobody_s_prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORETELL_PRICES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def mine(text: str, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# Whole nodes as clouds listed them in August 2026: dollars an hour, devices.
LISTED = {"H100": (31.92, 8), "A100-80GB": (22.32, 8), "A100-40GB": (15.92, 8), "B200": (53.52, 8), "V100": (6.32, 8),
          "GH200": (2.29, 1), "CPU": (0.83523, 1)}  # fmt: skip


@pytest.mark.parametrize("name", LISTED)
def test_a_price_is_a_node_s_list_price_over_its_devices(name: str) -> None:
    dollars, count = LISTED[name]
    price, source = price_per_hour(find(name))
    assert price == pytest.approx(dollars / count, rel=1e-3)
    assert source.startswith("assumed: ") and "2026-08-22" in source


def test_every_rented_part_has_a_price_and_every_row_a_device() -> None:
    rows = _catalogue("prices")["price"]
    named = [name for row in rows for name in row["devices"]]
    assert len(named) == len(set(named)) and all(find(name).name == name for name in named)
    without = {device.name for device in devices() if price_per_hour(device)[0] is None and device.backend != "mps"}
    unseen = {"MI250X-GCD-64GB", "MI355X", "P100-PCIe-16GB", "GTX-1080-Ti", "RTX-2080-Ti", "RTX-PRO-6000", "Arc-Pro-B60"}
    assert without == unseen, "nobody was seen to rent these"
    assert "FORETELL_PRICES" in price_per_hour(find("MI355X"))[1]


def test_a_cpu_costs_by_the_core() -> None:
    small = replace(find("CPU"), sm_count=2)
    whole, part = price_per_hour(find("CPU"))[0], price_per_hour(small)[0]
    assert whole and part and part == pytest.approx(whole / 4)


# Ember's figures for 2023, as Our World in Data printed them.
EMBER = {"FR": 56, "DE": 381, "CN": 582, "IN": 713, "CA": 170, "BR": 98, "AU": 549, "FI": 79, "DK": 152, "world": 481}


@pytest.mark.parametrize("region", EMBER)
def test_carbon_is_ember_s(region: str) -> None:
    grams, source = carbon_g_per_kwh(region)
    assert grams == pytest.approx(EMBER[region], abs=0.5)
    assert "2023" in source and not source.startswith("assumed")


def test_regions_by_any_name() -> None:
    assert carbon_g_per_kwh("france") == carbon_g_per_kwh("FRA") == carbon_g_per_kwh("FR")
    assert carbon_g_per_kwh("united_kingdom") == carbon_g_per_kwh("UK")
    assert all(15 < carbon_g_per_kwh(name)[0] < 900 for name in (row["name"] for row in _catalogue("carbon")["region"]))
    with pytest.raises(UnknownName, match="region 'Francia'") as caught:
        carbon_g_per_kwh("Francia")
    assert "France" in caught.value.near


def test_without_a_region_the_world_is_assumed() -> None:
    grams, source = carbon_g_per_kwh()
    assert grams == 481 and source.startswith("assumed: world")
    assert pue()[0] == 1.56 and pue()[1].startswith("assumed")


def test_the_user_s_figures_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'region = "SE"\npue = 1.1\n[dollars_per_hour]\nH100 = 2.1\nMI355X = 3\n[carbon_g_per_kwh]\nFR = 40\n'
    path = mine(text, tmp_path / "mine.toml")
    monkeypatch.setenv("FORETELL_PRICES", str(path))
    price, source = price_per_hour(find("H100-SXM-80GB"))
    assert price == 2.1 and str(path) in source
    assert price_per_hour(find("MI355X"))[0] == 3
    assert price_per_hour(find("H100-PCIe"))[0] == 3.29, "another part keeps its price"
    assert carbon_g_per_kwh()[0] == carbon_g_per_kwh("SE")[0] == 40.7
    assert carbon_g_per_kwh("France") == (40, f"your figure for FR, from {path}")
    assert pue() == (1.1, f"your figure, from {path}")
    path.write_text(text + "default = 12\n")
    assert carbon_g_per_kwh()[0] == 12 and carbon_g_per_kwh("SE")[0] == 40.7


def test_the_user_s_file_has_a_usual_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = mine("[dollars_per_hour]\nA100 = 1\n", tmp_path / "config" / "foretell" / "prices.toml")
    assert price_per_hour(find("A100")) == (1, f"your price, from {path}")
    monkeypatch.setenv("FORETELL_PRICES", str(mine("", tmp_path / "none.toml")))
    assert price_per_hour(find("A100"))[0] == 2.79, "the variable goes before the usual place"


def test_a_hardware_file_goes_before_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_PRICES", str(mine("[dollars_per_hour]\nH100 = 2\n", tmp_path / "mine.toml")))
    text = 'device = "H100"\nprice_per_hour = 0\nregion = "NO"\n'
    cluster = load(mine(text, tmp_path / "own.toml"))
    price, source = price_per_hour(cluster.device)
    assert price == 0 and "own.toml" in source
    assert carbon_of(cluster)[0] == 30.1
    assert carbon_of(replace(cluster, carbon_g_per_kwh=0.0)) == (0.0, "given with the hardware")
    assert carbon_of(parse("H100"))[0] == 481


WRONG = {
    "[dollars_per_hour]\nH1000 = 2\nH100 = -1\n": ["'H1000'", "'dollars_per_hour.H100' is -1"],
    "[dollars_per_hour]\nH100 = 'two'\n[carbon_g_per_kwh]\nMoon = 0\n": ["H100' is 'two'", "region 'Moon'"],
    "dollars = 2\nregion = 'Moon'\n": ["unknown field 'dollars'", "region 'Moon'"],
    "dollars_per_hour = 2\npue = 0.5\nregion = 3\n": ["'dollars_per_hour' is 2", "'pue' is 0.5", "'region' is 3"],
    "[dollars_per_hour]\nH100 = nan\nA100 = true\n": ["H100' is nan", "A100' is True"],
}


@pytest.mark.parametrize("text", WRONG)
def test_all_that_is_wrong_with_a_prices_file_is_told_at_once(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = mine(text, tmp_path / "wrong.toml")
    monkeypatch.setenv("FORETELL_PRICES", str(path))
    with pytest.raises(UserError) as caught:
        price_per_hour(find("T4"))
    assert all(part in str(caught.value) for part in WRONG[text]), str(caught.value)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_prices_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_PRICES", str(tmp_path / "nowhere.toml"))
    with pytest.raises(UserError, match=r"nowhere\.toml"):
        carbon_g_per_kwh()
    monkeypatch.setenv("FORETELL_PRICES", str(mine("H100 = ", tmp_path / "broken.toml")))
    with pytest.raises(FileFormatError, match=r"broken\.toml"):
        pue()


def test_footprints() -> None:
    board = 8 * footprint(find("H100")).embodied_kg_co2  # type: ignore[union-attr]
    assert board == 1312, "NVIDIA's figure for a board of eight"
    for device in devices():
        found = footprint(device)
        assert (found is None) == (device.backend in ("cpu", "mps", "xpu"))
        if found is not None:
            assert 0.1 < found.mass_kg < 5 and 20 < found.embodied_kg_co2 < 500
            assert found.heavy_metals_kg < found.mass_kg and all(found.sources.values())

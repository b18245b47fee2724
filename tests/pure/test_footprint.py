"""Devices that trainings use up, against the published counts of arXiv 2512.04142 and its journal version.

Parameters and tokens are inputs that give those counts to the last device: of GPT-4 they are not public, of the others they are known
from elsewhere (six FLOPs a parameter and token).
"""

from __future__ import annotations

import json

import pytest

from foretell.cli import main
from foretell.hardware import parse
from foretell.price.footprint import devices_used_up, scenarios

A100 = parse("A100-SXM-40GB").device
GPT_4 = 6 * 222e9 * 13e12


@pytest.mark.parametrize(
    ("mfu", "years", "published"),
    [(0.2, 1, 8800), (0.2, 5, 1760), (0.35, 2, 2515), (0.5, 3, 1174), (0.3, 5, 1174)],
)
def test_gpt_4_as_published(mfu: float, years: float, published: int) -> None:
    assert devices_used_up(GPT_4, A100.peak("bfloat16"), mfu, years) == published


@pytest.mark.parametrize(
    ("parameters", "tokens", "published"),
    [(200e9, 4e12, 697), (123e9, 2e12, 215), (70e9, 2e12, 122), (175e9, 300e9, 46)],
    ids=["Titan", "Mistral Large 2", "Llama 2", "GPT-3.5"],
)
def test_other_models_as_published(parameters: float, tokens: float, published: int) -> None:
    assert devices_used_up(6 * parameters * tokens, A100.peak("bfloat16"), 0.35, 2) == published


def test_what_better_use_and_longer_life_save() -> None:
    """67 % for either alone; 93 % for both takes five years, not three: 3 x 3 saves 89 %."""
    found = {(one.mfu, one.lifetime_years): one for one in scenarios(GPT_4, A100)}
    assert found[0.2, 1].saves == 0
    assert round(100 * found[0.6, 1].saves) == round(100 * found[0.2, 3].saves) == 67
    assert round(100 * found[0.6, 5].saves) == 93
    assert round(100 * found[0.6, 3].saves) == 89


def test_mass_as_published() -> None:
    """About 3,750 kg of material for 2,515 devices."""
    found, = scenarios(GPT_4, A100, mfus=(0.35,), lifetimes=(2.0,))
    assert found.mass_kg == pytest.approx(3750, rel=0.05)
    assert found.heavy_metals_kg == pytest.approx(0.9 * (found.mass_kg or 0))


@pytest.mark.parametrize("wrong", [{"mfu": 0.0}, {"mfu": 1.5}, {"lifetime_years": 0.0}, {"flops": 0.0}])
def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no training"):
        devices_used_up(**{"flops": 1e20, "peak_flops_per_second": 1e15, "mfu": 0.4, "lifetime_years": 3.0, **wrong})


def test_fit_tells_it_of_a_whole_run(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["fit", "gpt-tiny", "--on", "A100-SXM-40GB", "--samples", "1e12", "--footprint"]
    assert main([*asked, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    steps, flops = answer["run"]["steps"], answer["mfu"]["flops_per_step"]
    own, worst = answer["footprint"][0], answer["footprint"][1]
    assert own["mfu"] == answer["mfu"]["value"] and (worst["mfu"], worst["lifetime_years"]) == (0.2, 1.0)
    assert worst["devices"] == devices_used_up(steps * flops, answer["mfu"]["peak_flops_per_second"], 0.2, 1.0)
    assert main(asked) == 0
    assert "used up" in capsys.readouterr().out


def test_a_footprint_needs_a_whole_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "gpt-tiny", "--on", "A100", "--footprint"]) == 2
    assert "--tokens" in capsys.readouterr().err

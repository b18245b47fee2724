"""Model types of transformers, drawn by a public seed, eighteen of them in `make test`, each shrunken and traced; and the rules of their batches.

All types: benchmarks/sweep.py and its rows."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from foretell.errors import ForetellError, UserError
from foretell.simulate.memory.replay import peak_live
from foretell.trace.hub import build as hub
from foretell.trace.load.model import Source, load, notes
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.sandbox.blame import step_error
from foretell.trace.types import Trace
from tests.further import one_in

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DRAWN, TOKENS = 43, 64
LARGE = (
    "clap_audio_model", "deepseek_ocr2_vision", "deimv2", "kimi_k25", "lasr_ctc", "lfm2_vl", "lw_detr", "maskformer", "mimo_v2_flash", "mlcd",
    "owlv2", "phi4_multimodal", "pp_lcnet", "qwen3_vl", "reformer", "regnet", "rf_detr_dinov2", "sam3_tracker_video", "slanet", "smolvlm_vision",
    "speech_to_text", "tipsv2", "vitmatte", "xlnet", "zamba",
)  # fmt: skip
"""Drawn, and long to trace however they are shrunken: the others run in `make test`."""
LARGER = pytest.mark.slow(reason="seconds of tracing; eighteen smaller types are drawn")


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sweep() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return _module("sweep")
    finally:
        sys.path.remove(str(BENCHMARKS))


def _rows() -> dict[str, dict[str, Any]]:
    lines = (BENCHMARKS / "results" / "sweep.jsonl").read_text().splitlines()
    return {row["name"]: row for row in map(json.loads, lines) if row["library"] == "hf"}


def _types() -> list[str]:
    """Drawn of those that transformers builds here: what needs other packages, or has no model, is not counted in a sweep either."""
    import hashlib

    counted = [name for name, row in _rows().items() if "excluded" not in row]
    return sorted(sorted(counted, key=lambda name: hashlib.sha256(f"foretell sweep 2026-11/drawn:{name}".encode()).hexdigest())[:DRAWN])


def traced(model: str, precision: str = Recipe().precision, **sizes: Any) -> Trace:
    return capture(lambda: load(Source(model=model, **sizes)), Recipe(precision=precision), capability=(9, 0))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=LARGER if kind in LARGE else ()) for kind in _types()])
def test_a_drawn_type_has_an_answer_or_the_refusal_of_its_row(kind: str, sweep: Any, tmp_path: Path) -> None:
    row = _rows()[kind]
    told = sweep.shrunken(kind, tmp_path / kind, row["shrunken"]["step"] - 1)
    if "error" in told:
        pytest.skip(f"this transformers cannot build it: {told['error'][:100]}")
    how = {"micro_batch": row.get("micro_batch", 1), "precision": row.get("precision", Recipe().precision)}
    try:
        try:
            trace = traced(f"hf:{tmp_path / kind}", seq=TOKENS, **how)
        except Exception:  # too short for it, or not a whole grid: then as it is asked for without a length
            trace = traced(f"hf:{tmp_path / kind}", **how)
    except ForetellError as error:
        told_why = error
    except Exception as error:
        told_why = step_error(f"hf:{kind}", error)
    else:
        assert peak_live(trace, tuple(trace.schedule)) > 0
        return
    assert row["exit"] == 2 and isinstance(told_why, UserError) and told_why.remedy, str(told_why)


@pytest.fixture
def small(tmp_path: Path, sweep: Any) -> Any:
    def make(kind: str, **more: Any) -> str:
        told = sweep.shrunken(kind, tmp_path / kind)
        assert "error" not in told
        file = tmp_path / kind / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
        return f"hf:{tmp_path / kind}"

    return make


OTHER = pytest.mark.slow(reason="another model, which says otherwise how many there are")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["llava", pytest.param("qwen2_5_vl", marks=OTHER), pytest.param("qwen2_audio", marks=OTHER)])
def test_as_many_tokens_stand_for_a_picture_as_the_model_makes_of_it(kind: str, small: Any) -> None:
    """On real tensors: transformers itself refuses another number."""
    torch.manual_seed(0)
    workload = load(Source(model=small(kind)))
    with torch.no_grad():
        output = workload.model(**workload.batch)
    assert torch.isfinite(output.loss)


@pytest.mark.slow(reason="four traces; how many tokens stand for a picture is compared above")
@pytest.mark.filterwarnings("ignore")
def test_pictures_add_to_the_activations_of_a_text(small: Any) -> None:
    model = small("llava")
    text_only = json.loads((Path(model[3:]) / "config.json").read_text())["text_config"]
    folder = Path(model[3:]).parent / "text"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**text_only, "model_type": "llama"}))
    both, text = traced(model, seq=640), traced(f"hf:{folder}", seq=640)
    assert not any("text only" in note for note in notes()) and "vision" in str({op.module for op in both.programs["micro_first"].ops})
    assert peak_live(both, tuple(both.schedule)) > peak_live(text, tuple(text.schedule))


# ---------------------------------------------------------------- public names


@pytest.mark.parametrize("name", one_in(5, sorted(hub._known_ids()), "counted from its row as the others' are"))
def test_a_public_name_has_the_parameters_that_are_published(name: str) -> None:
    source = Source(model=f"hf:{name}")
    with torch.device("meta"):
        model = load(source).model
    assert sum(one.numel() for one in model.parameters()) == hub._known_ids()[name]["parameters"]


def test_an_unknown_public_name_is_told_the_near_ones() -> None:
    with pytest.raises(UserError, match=r"Llama-3\.1-8B") as caught:
        hub.check(Source(model="hf:meta-llama/Llama-3.1-8"))
    assert "config.json" in str(caught.value)


def test_a_folder_of_a_snapshot_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2}))
    assert traced(f"hf:{tmp_path}", seq=16).meta["parameters"] < 2_000_000

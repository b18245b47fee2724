"""Batches for classes of transformers that no rule knows: what docstrings tell, what refusals tell, and real steps with the result."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("transformers")

from foretell.errors import ModelError
from foretell.trace.hub import build as hub
from foretell.trace.hub import classes as hub_class
from foretell.trace.hub import documented_inputs as hub_told
from foretell.trace.hub import widen as hub_widen
from foretell.trace.load.model import Source, load, notes
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def sweep() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("sweep", BENCHMARKS / "sweep.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(BENCHMARKS))


class Config(SimpleNamespace):
    hidden_size, num_mel_bins, patch_size = 12, 5, 4

    def to_json_string(self, use_diff: bool = True) -> str:
        return json.dumps(vars(self))


# ------------------------------------------------------------------------------------------------ docstrings


def forward(
    x: Any, sizes: Any = None, y: Any = None, steps: int | None = None, speaker_embedding: Any = None, prompt: Any = None, use_cache: bool = False
) -> None:
    """
    Args:
        x (`torch.FloatTensor` of shape `(batch_size, sequence_length, hidden_size)`):
            Words.
        sizes (`torch.LongTensor` of shape `(batch_size, 2)`, *optional*):
            Height and width.
        y (`torch.BoolTensor` of shape `[batch_size, 2 * num_mel_bins + 1, config.hidden_size // 3]`, *optional*):
            Others.
        prompt: What is asked [batch_size, prompt_len, hidden_size]

    Returns:
        x (`torch.FloatTensor` of shape `(1, 1)`): not an input.
    """


def test_shapes_are_read_from_a_docstring_and_else_from_annotation_and_name() -> None:
    told = hub_told.of_forward(forward)
    assert told["x"] == ("float", ("batch_size", "sequence_length", "hidden_size"))
    assert told["sizes"] == ("whole", ("batch_size", "2"))
    assert told["y"].kind == "truth"
    assert told["steps"].kind == "count"
    assert told["prompt"] == ("float", ("batch_size", "prompt_len", "hidden_size"))
    assert told["speaker_embedding"] == ("float", ("batch_size", "sequence_length", "hidden_size"))
    assert not hub_told.may_be_given("use_cache") and not hub_told.may_be_given("past_key_values")


def test_sizes_are_settings_of_the_config_and_what_is_computed_from_them() -> None:
    model = SimpleNamespace(config=Config())
    sizes = hub_told.ShapeWords(Source(model="hf:x", micro_batch=3), model, {}, 7)
    told = hub_told.of_forward(forward)
    assert sizes.of(told["x"]) == (3, 7, 12)
    assert sizes.of(told["y"]) == (3, 11, 4)
    assert sizes.of(hub_told.Told("float", ("batch_size", "__import__('os')"))) is None


# ------------------------------------------------------------------------------------------------ refusals


def _refusal(work: Any) -> str:
    with pytest.raises((RuntimeError, ValueError)) as error:
        work()
    return str(error.value)


@pytest.mark.parametrize("fake", [False, True])
def test_the_sizes_that_torch_names_in_a_refusal_are_read(fake: bool) -> None:
    """Every refusal is torch's own, of real tensors and of fake ones, whose words differ."""
    from contextlib import nullcontext

    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() if fake else nullcontext():
        cases = {
            (6, 4): lambda: nn.Linear(4, 2)(torch.randn(1, 3, 6)),
            (7, 5): lambda: nn.Conv1d(5, 2, 1)(torch.randn(1, 7, 9)),
            (6, 8): lambda: nn.LayerNorm(8)(torch.randn(2, 6)),
            (3, 9): lambda: torch.randn(2, 3) + torch.randn(2, 9),
            (11, 13): lambda: torch.cat([torch.randn(1, 13), torch.randn(1, 11)]),
            (4, 5): lambda: torch.bmm(torch.randn(2, 3, 4), torch.randn(2, 5, 6)),
        }
        for pair, work in cases.items():
            said = _refusal(work)
            assert pair in list(hub_widen._sizes_in(said)), said


class Part(nn.Module):
    """Takes `x` of the width of its layer, `extra` although it is optional, and films with a size for their frames."""

    def __init__(self) -> None:
        super().__init__()
        self.config: Any = Config()
        self.layer = nn.Linear(20, 4)
        self.times = 0

    def forward(self, x: Any, pixel_values: Any = None, extra: Any = None, unused: Any = None) -> Tensor:
        """
        x (`torch.FloatTensor` of shape `(batch_size, sequence_length, hidden_size)`):
        extra (`torch.FloatTensor` of shape `(batch_size, 4)`, *optional*):
        pixel_values (`torch.FloatTensor` of shape `(batch_size, num_channels, height, width)`, *optional*):
        """
        self.times += 1
        batch_size, num_frames, num_channels, height, width = pixel_values.shape
        made = self.layer(x)
        return made + extra.unsqueeze(1) + pixel_values.mean() * (batch_size + num_frames + num_channels + height + width)


def asked(model: nn.Module, **source: Any) -> hub_widen.BatchTrial:
    return hub_widen.BatchTrial(Source(model="hf:x", image=8, **source), model, "x", 7, 100)


def test_a_refused_batch_becomes_one_that_runs() -> None:
    hub_widen._FOUND.clear()
    model = Part()
    batch = {"x": torch.randn(2, 7, 12)}
    found = asked(model, micro_batch=2).widened(batch)
    assert {name: tuple(value.shape) for name, value in found.items()} == {"x": (2, 7, 20), "pixel_values": (2, 16, 3, 8, 8), "extra": (2, 4)}
    model(**found).sum().backward()
    often = model.times
    again = asked(model, micro_batch=2).widened(batch)  # the same model built again is not asked again
    assert model.times == often
    assert {name: value.shape for name, value in again.items()} == {name: value.shape for name, value in found.items()}


def test_a_batch_that_runs_stays_and_so_does_one_that_nothing_mends() -> None:
    class Never(Part):
        def forward(self, x: Any) -> Tensor:  # type: ignore[override]
            raise ValueError("no")

    hub_widen._FOUND.clear()
    fits = {"x": torch.randn(1, 7, 20), "pixel_values": torch.randn(1, 1, 3, 8, 8), "extra": torch.randn(1, 4)}
    assert asked(Part()).widened(fits) == fits
    refused = {"x": torch.randn(1, 7, 12)}
    assert asked(Never()).widened(refused)["x"] is refused["x"]


# ------------------------------------------------------------------------------------------------ types of transformers

REALLY = ("xclip", "blt_local_decoder", "qwen2_5_omni_audio_encoder", "minicpmv4_6_vision", "moshi_depth", "prophetnet", "xmod", "seggpt")


FEW = ("blt_local_decoder", "qwen2_5_omni_audio_encoder", "minicpmv4_6_vision")
MORE = pytest.mark.slow(reason="another type; a batch of text, of sound and of images is found and run")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in FEW else MORE) for kind in REALLY])
def test_a_real_step_runs_with_the_batch_that_was_found(kind: str, sweep: Any, tmp_path: Path) -> None:
    """The batch that fake tensors led to, given to the class on real ones: PyTorch runs a step of it, and its weights have gradients."""
    assert "error" not in sweep.shrunken(kind, tmp_path / kind)
    model = f"hf:{tmp_path / kind}"
    trace = capture(lambda: load(Source(model=model)), Recipe(), capability=(9, 0))
    assert trace.schedule
    torch.manual_seed(0)
    workload = load(Source(model=model))
    loss = workload.loss(workload.model(**workload.batch), workload.batch)
    loss.backward()
    assert torch.isfinite(loss) and any(one.grad is not None for one in workload.model.parameters())


@pytest.mark.filterwarnings("ignore")
def test_inputs_that_were_guessed_are_told(sweep: Any, tmp_path: Path) -> None:
    sweep.shrunken("xclip", tmp_path)
    capture(lambda: load(Source(model=f"hf:{tmp_path}")), Recipe(), capability=(9, 0))
    assert any("pixel_values of 1 × 8 × 3 × 224 × 224: inputs of XCLIPModel" in note for note in notes())


BUILT = {"wav2vec2-bert": "Wav2Vec2BertForSequenceClassification", "musicgen": "MusicgenForConditionalGeneration",
         "ministral": "MinistralForCausalLM", "instructblip_qformer": "InstructBlipQFormerModel"}  # fmt: skip


@pytest.mark.parametrize(("kind", "expected"), BUILT.items())
def test_a_type_is_built_as_the_first_class_that_its_defaults_allow(kind: str, expected: str) -> None:
    with torch.device("meta"):
        config = hub.config_of(Source(model=f"hf:{kind}"), kind)
        cls, model = hub_class.built(config, lambda cls: cls(config))
    assert cls.__name__ == expected and type(model) is cls


def test_a_package_that_is_not_there_is_told_and_parts_do_not_stand_for_the_whole() -> None:
    config = hub.config_of(Source(model="hf:bert"), "bert")
    assert not {"BertEncoder", "BertLayer"} & {cls.__name__ for cls in hub_class.model_classes(config)}

    def build(cls: Any) -> Any:
        raise ImportError("it needs a package")

    with pytest.raises(ImportError, match="needs a package"):
        hub_class.built(config, build)


def test_a_config_that_names_its_class_is_built_as_that_or_not_at_all(tmp_path: Path) -> None:
    config = {"model_type": "wav2vec2-bert", "architectures": ["Wav2Vec2BertForCTC"], "num_hidden_layers": 1, "hidden_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="vocabulary size"):
        capture(lambda: load(Source(model=f"hf:{tmp_path}")), Recipe(), capability=(9, 0))


def test_a_loss_stands_in_for_what_depends_on_a_weight() -> None:
    weight = torch.ones(3, requires_grad=True)
    assert hub.own_loss({"places": torch.zeros(2), "scores": weight * 2}, {}).item() == 2
    with pytest.raises(ModelError, match="no output of the model depends on a weight"):
        hub.own_loss({"places": torch.zeros(2)}, {})


@pytest.mark.slow(reason="a long trace; a Fourier transform is asked again in fp32 below")
@pytest.mark.filterwarnings("ignore")
def test_two_dtypes_of_one_op_under_autocast_are_asked_again_in_fp32(sweep: Any, tmp_path: Path) -> None:
    assert "error" not in sweep.shrunken("bigbird_pegasus", tmp_path)
    row = sweep.trace(f"hf:{tmp_path}")
    assert row["exit"] == 0 and row["precision"] == "fp32"



@pytest.mark.filterwarnings("ignore")
def test_a_fourier_transform_is_asked_again_in_fp32(sweep: Any, tmp_path: Path) -> None:
    assert "error" not in sweep.shrunken("fnet", tmp_path)
    row = sweep.trace(f"hf:{tmp_path}")
    assert row["exit"] == 0 and row["precision"] == "fp32"


LONGER = pytest.mark.slow(reason="another model of sound")


@pytest.mark.parametrize(("model", "shape"), [("wav2vec2-bert", (2, 40, 160)), pytest.param("univnet", (2, 40, 100), marks=LONGER)])
def test_a_length_that_is_asked_for_is_that_of_the_sound(model: str, shape: tuple[int, ...]) -> None:
    """Models of sound alone: `--seq` is how many frames they hear, whatever else their config counts."""
    overrides = {"num_hidden_layers": 1, "vocab_size": 32} if model == "wav2vec2-bert" else {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = load(Source(model=f"hf:{model}", micro_batch=2, seq=40, overrides=overrides))
    assert workload.batch["input_features"].shape == shape

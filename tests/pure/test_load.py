"""Models from every place a user may have them, and the words foretell finds when something is wrong with them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from foretell import zoo
from foretell.errors import MissingModel, MissingPackage, ModelError, UnknownName, UserError
from foretell.trace.hub import build as hub
from foretell.trace.load import model as load
from foretell.trace.load import userfile
from foretell.trace.load.model import Source
from foretell.trace.record.step import Workload, compute_loss
from tests.further import one_in

ROOT = Path(__file__).resolve().parents[2]
SMALL = [name for name in zoo.names() if zoo.get(name).small]
TINY = {
    "hf:gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 64},
    "hf:llama": {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
                 "num_key_value_heads": 1, "vocab_size": 64},
    "hf:bert": {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
                "vocab_size": 64},
    "hf:roberta": {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
                   "vocab_size": 64, "max_position_embeddings": 32},
    "hf:t5": {"num_layers": 2, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "vocab_size": 64},
    "hf:bart": {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
                "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 64},
    "hf:vit": {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
               "image_size": 32},
    "hf:clip": {"text_config.num_hidden_layers": 1, "text_config.vocab_size": 64, "text_config.hidden_size": 16,
                "text_config.num_attention_heads": 2, "vision_config.num_hidden_layers": 1,
                "vision_config.hidden_size": 16, "vision_config.num_attention_heads": 2,
                "vision_config.image_size": 32, "text_config.eos_token_id": 2},
    "hf:whisper": {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "encoder_attention_heads": 2,
                   "decoder_attention_heads": 2, "vocab_size": 64, "max_source_positions": 20, "pad_token_id": 0,
                   "decoder_start_token_id": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
}  # fmt: skip
BUILT_AS = {
    "hf:gpt2": "GPT2LMHeadModel", "hf:llama": "LlamaForCausalLM", "hf:bert": "BertForMaskedLM",
    "hf:roberta": "RobertaForMaskedLM", "hf:t5": "T5ForConditionalGeneration",
    "hf:bart": "BartForConditionalGeneration", "hf:vit": "ViTForImageClassification", "hf:clip": "CLIPModel",
    "hf:whisper": "WhisperForConditionalGeneration",
}  # fmt: skip

MODEL = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self, dim=4):
        super().__init__()
        self.layer = nn.Linear(dim, dim)
    def forward(self, x):
        return self.layer(x)
"""
BATCH = """
def batch(model, micro_batch, seq):
    return {"x": torch.randn(micro_batch, seq or 5, model.layer.in_features)}
"""
LOSS = """
def loss(output, batch):
    return output.pow(2).sum()
"""


@pytest.fixture(autouse=True)
def clean_imports() -> Iterator[None]:
    """What a user's file adds to the import state goes with the test."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if "_foretell" in name or name in ("helper", "pack"):
            del sys.modules[name]


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def step(workload: Workload) -> Tensor:
    workload.model.train()
    loss = compute_loss(workload)
    loss.backward()
    return loss


def fail(source: Source, kind: type[UserError]) -> UserError:
    with pytest.raises(UserError) as caught:
        load.load(source)
    assert type(caught.value) is kind
    return caught.value


# --- zoo -------------------------------------------------------------------------------------------------------------


FIRST = [next(name for name in SMALL if zoo.get(name).domain == domain) for domain in dict.fromkeys(zoo.get(name).domain for name in SMALL)]
"""One of each domain."""
OTHERS = pytest.mark.slow(reason="some are loaded; the zoo's own tests run a step of each of the others")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FIRST[::6] else OTHERS) for name in SMALL])
def test_small_zoo_models_load_fake_and_give_a_loss(name: str) -> None:
    """The loss of a few: that of every model is taken where the zoo's own tests run a step of it."""
    with FakeTensorMode():
        workload = load.load(Source(model=name, micro_batch=2))
        assert all(isinstance(parameter, FakeTensor) for parameter in workload.model.parameters())
        if name in FIRST:
            assert step(workload).dim() == 0


def test_zoo_sizes_reach_the_batch() -> None:
    with FakeTensorMode():
        text = load.load(Source(model="llama-tiny", micro_batch=3, seq=40))
        wide = load.load(Source(model="vit-tiny", image=64))
        grown = load.load(Source(model="gpt-tiny", overrides={"context": 256}))
        built = load.load(Source(model="vit-tiny", overrides={"image": 48}))
    assert text.batch["input_ids"].shape == (3, 40)
    assert wide.batch["images"].shape == (1, 3, 64, 64)
    assert grown.batch["input_ids"].shape == (1, 256)
    assert built.batch["images"].shape == (1, 3, 48, 48)


def test_a_text_longer_than_the_position_table_is_refused(tmp_path: Path) -> None:
    text = MODEL + BATCH + LOSS + "def make():\n    net = Net()\n    net.wpe = nn.Embedding(128, 4)\n    return net"
    path = write(tmp_path, text)
    with FakeTensorMode():
        load.load(Source(model=f"{path}:make", seq=128))
        error = fail(Source(model=f"{path}:make", seq=129), UserError)
        assert "128" in fail(Source(model="gpt-tiny", seq=129), ModelError).problem
    assert "129 tokens are more than the 128 positions of" in error.problem


def test_meta_and_real_loads() -> None:
    with torch.device("meta"):
        workload = load.load(Source(model="gpt-tiny"))
    assert {parameter.device.type for parameter in workload.model.parameters()} == {"meta"}
    real = load.load(Source(model="gpt-tiny", seq=8))
    assert torch.isfinite(step(real))


def test_unknown_zoo_names_and_settings_have_near_ones() -> None:
    error = fail(Source(model="lama3-8b"), UnknownName)
    assert error.problem == "unknown model 'lama3-8b'"
    assert "llama3-8b" in error.remedy and "file.py:function" in error.remedy
    error = fail(Source(model="llama3-8b", overrides={"layer": 2}), UserError)
    assert error.problem == "llama3-8b has no setting 'layer'"
    assert "layers" in error.remedy


@pytest.mark.parametrize("size", [{"micro_batch": 0}, {"seq": -1}, {"image": 0}, {"micro_batch": 1.5}, {"seq": True}])
def test_bad_sizes(size: dict[str, Any]) -> None:
    error = fail(Source(model="gpt-tiny", **size), UserError)
    (name,) = size
    assert error.problem.startswith(f"{name} must be a whole number above zero")


def test_describe() -> None:
    assert load.describe(Source(model="llama3-8b")) == "llama3-8b, micro-batch 1 × 8192 tokens"
    assert load.describe(Source(model="resnet50", micro_batch=8)) == "resnet50, micro-batch 8 × 224×224 pixels"
    assert load.describe(Source(model="hf:llama", seq=64)) == "hf:llama, micro-batch 1 × 64 tokens"
    assert load.describe(Source(model="gpt2", overrides={"layers": 2})).endswith("1024 tokens, layers=2")


# --- the user's own file ---------------------------------------------------------------------------------------------

FORMS = {
    "module": MODEL + BATCH + LOSS + "def make(dim=4): return Net(dim)",
    "class": MODEL + BATCH + LOSS + "make = Net",
    "pair": MODEL
    + LOSS
    + "def make(micro_batch, seq=5, dim=4): return Net(dim), (torch.randn(micro_batch, seq, dim),)",
    "triple": MODEL + "def make(micro_batch, seq=5, dim=4):\n"
    "    return Net(dim), torch.randn(micro_batch, seq, dim), lambda output, batch: output.sum()",
    "dict": MODEL + LOSS + "def make(micro_batch, seq=5, dim=4):\n"
    "    return {'model': Net(dim), 'batch': [torch.randn(micro_batch, seq, dim)], 'loss': None}",
    "dict and batch()": MODEL + BATCH + "def make(**kw): return {'model': Net(**kw), 'loss': lambda o, b: o.mean()}",
}


@pytest.mark.parametrize("form", FORMS)
def test_user_files_in_every_form(form: str, tmp_path: Path) -> None:
    path = write(tmp_path, FORMS[form])
    with FakeTensorMode():
        workload = load.load(Source(model=f"{path}:make", micro_batch=3, overrides={"dim": 6}))
        step(workload)
    (batch,) = torch.utils._pytree.tree_leaves(workload.batch)
    assert batch.shape == (3, 5, 6)
    assert path in load.user_files()


def test_user_files_are_the_users_only(tmp_path: Path) -> None:
    write(tmp_path, "SIZE = 7", "helper.py")
    path = write(tmp_path, MODEL + BATCH + LOSS + "from helper import SIZE\ndef make(): return Net(SIZE)")
    workload = load.load(Source(model=f"{path}:make"))
    assert workload.batch["x"].shape == (1, 5, 7)
    files = load.user_files()
    assert {path, str(tmp_path / "helper.py")} <= set(files)
    assert not [file for file in files if "site-packages" in file or "foretell/trace" in file]
    assert not [file for file in files if file.endswith(("/json/__init__.py", "/pathlib.py", "/dataclasses.py"))]


def test_a_file_is_read_anew_and_may_sit_in_a_package(tmp_path: Path) -> None:
    write(tmp_path / "pack", "", "__init__.py")
    write(tmp_path / "pack", "SIZE = 3", "sizes.py")
    text = MODEL + BATCH + LOSS + "from .sizes import SIZE\ndef make(): return Net(SIZE + ADDED)\n"
    for added in (0, 2):
        path = write(tmp_path / "pack", text + f"ADDED = {added}")
        assert load.load(Source(model=f"{path}:make")).batch["x"].shape[-1] == 3 + added


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    path = write(tmp_path, "def half(output, batch): return output.float().mean() * 0.5")
    workload = load.load(Source(model="gpt-tiny", seq=8, loss=f"{path}:half"))
    assert workload.loss is not None and workload.loss.__name__ == "half"
    assert step(workload).dim() == 0


def test_a_constructor_that_reads_values_is_built_aside(tmp_path: Path) -> None:
    text = MODEL + BATCH + LOSS + (
        "class Deep(Net):\n"
        "    def __init__(self):\n"
        "        super().__init__(8)\n"
        "        self.rates = [x.item() for x in torch.linspace(0, 0.5, 3)]\n"
        "        self.twin = nn.Linear(8, 8)\n"
        "        self.twin.weight = self.layer.weight\n"
        "        self.register_buffer('count', torch.zeros(2, dtype=torch.int64))\n"
        "        self.plain = torch.ones(8)\n"
        "    def forward(self, x): return self.twin(self.layer(x)) + self.plain\n"
    )  # fmt: skip
    path = write(tmp_path, text)
    with FakeTensorMode():
        workload = load.load(Source(model=f"{path}:Deep"))
        step(workload)
    model: Any = workload.model
    assert model.rates == [0.0, 0.25, 0.5]
    assert model.twin.weight is model.layer.weight and isinstance(model.layer.weight, FakeTensor)
    assert model.layer.weight.grad is not None and isinstance(model.layer.weight, nn.Parameter)
    assert model.count.dtype == torch.int64 and isinstance(model.count, FakeTensor)
    path = write(tmp_path, MODEL + "def make():\n    return Net(int(torch.randn(3).sum().item()))", "worse.py")
    with FakeTensorMode():
        error = fail(Source(model=f"{path}:make"), ModelError)
    assert "reads the value of a tensor" in error.remedy and "worse.py" in error.detail


MASKED = """
class Masked(Net):
    def __init__(self):
        super().__init__(8)
        keep = torch.ones(6, 6).triu(1).bool()
        keep[0] = False
        self.register_buffer("pairs", torch.cartesian_prod(torch.arange(6), torch.arange(6)).view(6, 6, 2)[keep])
        self.scale = nn.Parameter(torch.zeros(6, 6)[keep])
"""


def test_a_mask_may_say_in_a_constructor_how_many_there_are(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL + BATCH + LOSS + MASKED)
    with FakeTensorMode():
        workload = load.load(Source(model=f"{path}:Masked"))
        step(workload)
    model: Any = workload.model
    assert model.pairs.shape == (10, 2) and model.scale.shape == (10,) and isinstance(model.scale, nn.Parameter)
    assert isinstance(model.pairs, FakeTensor) and isinstance(model.scale, FakeTensor)
    drawn = MASKED.replace("torch.ones(6, 6).triu(1).bool()", "torch.rand(6, 6) > 0.5")
    with FakeTensorMode():
        error = fail(Source(model=f"{write(tmp_path, MODEL + drawn, 'drawn.py')}:Masked"), ModelError)
    assert "drawn.py" in error.detail, "how many a drawn mask lets through is not known"


@pytest.mark.parametrize("cast", ["half()", "bfloat16()", "to(torch.float64)"])
def test_a_factory_that_casts_its_model(cast: str, tmp_path: Path) -> None:
    path = write(
        tmp_path, MODEL + f"def make():\n    model = Net().{cast}\n    return model, next(model.parameters()) * 1"
    )
    with FakeTensorMode():
        workload = load.load(Source(model=f"{path}:make"))
        out = workload.model(workload.batch)
    assert out.dtype == getattr(torch, {"h": "float16", "b": "bfloat16", "t": "float64"}[cast[0]])
    assert all(isinstance(parameter, FakeTensor) for parameter in workload.model.parameters())


def test_no_batch_says_what_to_return(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL + "def make(): return Net()")
    error = fail(Source(model=f"{path}:make"), UserError)
    assert error.problem.endswith(f"gives no batch ({path}:12)")
    assert "return (model, batch)" in error.remedy
    assert len(error.detail.splitlines()) == 3
    path = write(tmp_path, MODEL + "def make(): return Net(), 3")
    assert fail(Source(model=f"{path}:make"), UserError).problem.endswith(f"gives a batch of type int ({path}:12)")
    path = write(tmp_path, "def make(): return 3")
    assert fail(Source(model=f"{path}:make"), UserError).problem.endswith(f"returned int, not a model ({path}:1)")
    path = write(tmp_path, MODEL + "def make(): return {'model': Net(), 'bacth': 1}")
    assert "no setting 'bacth'" in fail(Source(model=f"{path}:make"), UserError).problem


def test_the_example_in_the_error_works(tmp_path: Path) -> None:
    text = "import torch\nclass MyModel(torch.nn.Embedding):\n    def __init__(self): super().__init__(1000, 4)\n"
    text += "    def forward(self, x): return super().forward(x)\n"
    path = write(tmp_path, text + userfile.EXAMPLE)
    step(load.load(Source(model=f"{path}:model", micro_batch=2, seq=16)))


DATA = """
class Points:
    def __len__(self): return 3
    def __getitem__(self, i): return {"x": torch.tensor([float(i)] * 4), "y": i}
def data(split): return Points() if split == "train" else None
def loss(output, batch): return (output.sum(1) - batch["y"]).square().mean()
"""


def test_a_file_alone_means_its_model_and_samples_make_the_batch(tmp_path: Path) -> None:
    text = "import torch\n" + DATA + "class Net(torch.nn.Linear):\n    def forward(self, x): return super().forward(x)\n"
    path = write(tmp_path, text + "def model(): return Net(4, 2)\n")
    workload = load.load(Source(model=path, micro_batch=4))
    assert workload.batch["x"][:, 0].tolist() == [0, 1, 2, 0] and workload.batch["y"].tolist() == [0, 1, 2, 0]
    step(workload)
    with FakeTensorMode():
        fake = load.load(Source(model=path, micro_batch=4))
        assert isinstance(fake.batch["x"], FakeTensor) and fake.batch["x"].shape == (4, 4)
        assert fake.batch["y"].dtype == torch.int64
    path = write(tmp_path, text.replace("return Points()", "return iter([])[0]") + "def model(): return Net(4, 2)\n")
    error = fail(Source(model=path), ModelError)
    assert "mine.py:data failed: TypeError" in error.problem


def test_missing_files_and_functions(tmp_path: Path) -> None:
    missing = tmp_path / "none.py"
    error = fail(Source(model=f"{missing}:make"), MissingModel)
    assert error.problem == f"there is no file {missing}"
    path = write(tmp_path, "import os\ndef build(): ...\nclass Net: ...")
    error = fail(Source(model=f"{path}:make"), MissingModel)
    assert error.problem == f"{path} has no function 'make'"
    assert error.remedy == f"it has: build, Net; write {path}:build"
    other = write(tmp_path / "other", "def make(): ...")
    assert fail(Source(model=other), MissingModel).problem == f"no function given for {other}"
    error = fail(Source(model="gpt-tiny", loss=f"{path}:loss"), MissingModel)
    assert error.problem == f"{path} has no function 'loss'"
    path = write(tmp_path, "from os.path import *\ndef build(): ...")
    assert "it has: build;" in fail(Source(model=f"{path}:make"), MissingModel).remedy


def test_an_override_the_function_does_not_take(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL + BATCH + "def make(width=4): return Net(width)")
    error = fail(Source(model=f"{path}:make", overrides={"widht": 3}), UserError)
    assert error.problem == f"{path}:make has no setting 'widht'"
    assert error.remedy == "near names: width"


def test_a_factory_that_raises_shows_only_its_own_frames(tmp_path: Path) -> None:
    text = "import torch\ndef inner():\n    return torch.nn.Linear(2, 2)(torch.ones(3))\ndef make(): return inner()"
    path = write(tmp_path, text)
    error = fail(Source(model=f"{path}:make"), ModelError)
    assert error.problem.startswith(f"building {path}:make failed: RuntimeError: ")
    assert "\n" not in error.problem
    assert 'mine.py", line 4, in make' in error.detail and 'mine.py", line 3, in inner' in error.detail
    assert "site-packages" not in error.detail and "load.py" not in error.detail and "importlib" not in error.detail
    message = error.problem.partition("RuntimeError: ")[2].partition(" (")[0]
    assert message and message not in error.detail, "it is told once"


def test_a_message_of_several_lines_and_its_cause_are_told_whole(tmp_path: Path) -> None:
    text = "def make():\n    try:\n        1 / 0\n    except ZeroDivisionError as error:\n        raise ValueError('one\\ntwo') from error"
    error = fail(Source(model=f"{write(tmp_path, text)}:make"), ModelError)
    assert "ValueError: one (" in error.problem
    assert error.detail.splitlines()[-3:] == ["ValueError: one", "two", "caused by ZeroDivisionError: division by zero"]


@pytest.mark.parametrize("text", ["def make(:", "import torch\nraise SystemExit(3)\ndef make(): ..."])
def test_a_file_that_cannot_be_imported(text: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    error = fail(Source(model=f"{path}:make"), ModelError)
    assert error.problem.startswith(f"building {path}:make failed: S") and f"({path}:" in error.problem


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with CUDA does not raise")
@pytest.mark.parametrize(
    "body", ["Net().cuda()", "Net().to('cuda')", "nn.Linear(2, 2, device='cuda')", "torch.cuda.current_device()"]
)
@pytest.mark.parametrize("fake", [True, False])
def test_touching_cuda_while_building(body: str, fake: bool, tmp_path: Path) -> None:
    path = write(tmp_path, MODEL + BATCH + f"def make():\n    model = {body}\n    return model, torch.ones(2)")
    with FakeTensorMode() if fake else torch.enable_grad():
        error = fail(Source(model=f"{path}:make"), ModelError)
    assert error.remedy == "build the model on the CPU or meta device; foretell decides where it runs"


# --- without torch ---------------------------------------------------------------------------------------------------


def test_check_imports_no_torch(tmp_path: Path) -> None:
    path = write(tmp_path, MODEL + "def make(): return Net()")
    config = write(tmp_path, json.dumps({"model_type": "llama"}), "config.json")
    script = f"""
import sys
from foretell.errors import UserError
from foretell.trace.load.model import Source, check, describe
for model in ("llama3-8b", {path + ":make"!r}):
    check(Source(model=model)); describe(Source(model=model))
for model in ("hf:llama", "hf:" + {config!r}, "hf:lama", "timm:resnet50", "torchvision:resnet18", "nothing"):
    try:
        check(Source(model=model))
    except UserError as error:
        print(error)
assert not {{"torch", "transformers", "timm"}} & set(sys.modules), "imported too much"
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "unknown model 'nothing'" in done.stdout


@pytest.mark.parametrize(
    ("model", "package", "extra"),
    [
        ("hf:llama", "transformers", "hf"),
        ("timm:resnet50", "timm", "timm"),
        ("torchvision:vgg11", "torchvision", "torchvision"),
    ],
)
def test_missing_packages_name_their_extra(
    model: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = hub.importlib.util.find_spec
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(MissingPackage) as caught:
        load.check(Source(model=model))
    assert caught.value.package == package
    assert caught.value.remedy == f"pip install 'foretell[{extra}]'"


# --- transformers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("model", TINY)
def test_hf_models_train_for_real(model: str, transformers: Any) -> None:
    source = Source(model=model, micro_batch=2, seq=12, overrides=TINY[model])
    torch.manual_seed(0)
    workload = load.load(source)
    assert type(workload.model).__name__ == BUILT_AS[model]
    assert workload.model.dtype is torch.float32
    loss = step(workload)
    assert torch.isfinite(loss) and loss > 0.1
    assert all(p.grad is not None for p in workload.model.parameters() if p.requires_grad)


@pytest.mark.parametrize("model", one_in(3, TINY, "built as the others are; its real step is above"))
def test_hf_models_are_the_same_fake_and_real(model: str, transformers: Any) -> None:
    source = Source(model=model, micro_batch=2, seq=12, overrides=TINY[model])
    real = load.load(source)
    with FakeTensorMode():
        fake = load.load(source)
        step(fake)

    def shapes(workload: Workload) -> Any:
        named = {name: tuple(p.shape) for name, p in workload.model.named_parameters()}
        return named, {key: getattr(value, "shape", value) for key, value in workload.batch.items()}

    assert shapes(fake) == shapes(real)
    assert all(isinstance(parameter, FakeTensor) for parameter in fake.model.parameters())


def test_hf_tied_weights_stay_tied_when_initialisation_is_skipped(transformers: Any) -> None:
    with FakeTensorMode():
        model: Any = load.load(Source(model="hf:gpt2", overrides=TINY["hf:gpt2"])).model
    assert model.lm_head.weight is model.transformer.wte.weight
    linear = nn.Linear(64, 64)
    assert linear.weight.std() > 0, "initialisers are back afterwards"


def test_hf_usual_sizes_and_no_cache(transformers: Any) -> None:
    with FakeTensorMode():
        gpt2 = load.load(Source(model="hf:gpt2", overrides=TINY["hf:gpt2"]))
        llama = load.load(Source(model="hf:llama", overrides=TINY["hf:llama"]))
        roberta = load.load(Source(model="hf:roberta", overrides=TINY["hf:roberta"]))
        vit = load.load(Source(model="hf:vit", overrides=TINY["hf:vit"], image=64))
        output = llama.model(**llama.batch)
    assert gpt2.batch["input_ids"].shape == (1, 1024)
    assert llama.batch["input_ids"].shape == (1, 1024)
    assert roberta.batch["input_ids"].shape == (1, 30), "two positions are the padding's"
    assert vit.batch["pixel_values"].shape == (1, 3, 64, 64)
    assert output.past_key_values is None
    step(load.load(Source(model="hf:roberta", overrides=TINY["hf:roberta"])))


def test_hf_config_files(tmp_path: Path, transformers: Any) -> None:
    config = {
        "model_type": "bert",
        **TINY["hf:bert"],
        "architectures": ["BertForPreTraining"],
        "torch_dtype": "bfloat16",
    }
    path = write(tmp_path, json.dumps(config), "config.json")
    for name in (path, str(tmp_path)):
        workload = load.load(Source(model=f"hf:{name}", seq=6, overrides={"num_hidden_layers": 1}))
        assert type(workload.model).__name__ == "BertForPreTraining"
        assert len(workload.model.bert.encoder.layer) == 1
        assert workload.model.dtype is torch.float32, "precision is the recipe's to choose"
        step(workload)


def test_hf_without_a_loss_of_its_own_says_so(tmp_path: Path, transformers: Any) -> None:
    config = {"model_type": "bert", **TINY["hf:bert"], "architectures": ["BertModel"]}
    path = write(tmp_path, json.dumps(config), "config.json")
    workload = load.load(Source(model=f"hf:{path}", seq=6))
    step(workload)
    assert any("stands in" in note for note in load.notes())
    load.load(Source(model="gpt-tiny", seq=8))
    assert load.notes() == []


def test_hf_errors(tmp_path: Path, transformers: Any) -> None:
    error = fail(Source(model="hf:lama"), UnknownName)
    assert error.problem == "unknown transformers model type 'lama'" and "llama" in error.remedy
    error = fail(Source(model="hf:llama", overrides={"num_hiden_layers": 2}), UserError)
    assert error.problem == "the llama config has no setting 'num_hiden_layers'"
    assert "num_hidden_layers" in error.remedy
    assert (
        "has no setting 'text_config.layers'"
        in fail(Source(model="hf:clip", overrides={"text_config.layers": 2}), UserError).problem
    )
    error = fail(Source(model="hf:nobody/no-such-model"), UnknownName)
    assert "unknown model by its public name" in error.problem and "works offline" in error.remedy
    assert "has no 'model_type'" in fail(Source(model=f"hf:{write(tmp_path, '{}', 'a.json')}"), UserError).problem
    assert "is not JSON" in fail(Source(model=f"hf:{write(tmp_path, '{', 'b.json')}"), UserError).problem
    error = fail(Source(model="hf:bert", overrides={**TINY["hf:bert"], "num_attention_heads": 3}), ModelError)
    assert error.problem.startswith("building hf:bert failed: ")
    with FakeTensorMode():
        error = fail(Source(model="hf:gpt2", overrides=TINY["hf:gpt2"], seq=2000), UserError)
    assert "2000 tokens are more than the 1024 positions" in error.problem


def test_the_types_read_from_source_are_those_transformers_knows(transformers: Any) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert set(CONFIG_MAPPING_NAMES) <= hub._known_types()


# --- timm and torchvision --------------------------------------------------------------------------------------------


def test_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("timm")
    with FakeTensorMode():
        resnet = load.load(Source(model="timm:resnet18", micro_batch=2, overrides={"num_classes": 7, "in_chans": 1}))
        vit = load.load(Source(model="timm:vit_tiny_patch16_224", image=64))
        features = load.load(Source(model="timm:resnet18", overrides={"num_classes": 0}))
        for workload in (resnet, vit, features):
            step(workload)
    assert resnet.batch["x"].shape == (2, 1, 224, 224)
    assert vit.batch["x"].shape == (1, 3, 64, 64)
    assert all(isinstance(parameter, FakeTensor) for parameter in vit.model.parameters())
    assert "resnet50" in fail(Source(model="timm:resnet5"), UnknownName).remedy
    assert fail(Source(model="timm:resnet18", overrides={"num_clases": 3}), ModelError).problem.startswith(
        "building timm:"
    )


def test_torchvision() -> None:
    pytest.importorskip("torchvision")
    with FakeTensorMode():
        for name, side in (("resnet18", 224), ("vit_b_16", 64), ("googlenet", 96)):
            workload = load.load(Source(model=f"torchvision:{name}", micro_batch=2, image=side))
            step(workload)
            assert workload.batch["x"].shape == (2, 3, side, side)
    assert "resnet50" in fail(Source(model="torchvision:resnet5"), UnknownName).remedy


@pytest.mark.slow(reason="transformers in a process of its own; a trace leaves nothing behind in test_userfiles.py")
def test_building_a_transformers_model_leaves_torch_as_it_was() -> None:
    """transformers has a `linspace` of its own meanwhile, and torch notes the functions that make tensors when it first needs them."""
    pytest.importorskip("transformers.initialization")
    code = (
        "import torch\nfrom foretell.trace.hub import build as hub\n"
        "with hub._without_initialisation():\n    pass\n"
        "from transformers.initialization import meta_device_safe_creation_ops as own\n"
        "with own(), torch.device('meta'):\n    torch.zeros(1)\n"
        "with torch.device('meta'):\n    print(torch.linspace(0, 1, 2).device)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2])
    assert done.stdout.strip() == "meta", done.stderr

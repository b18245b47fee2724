"""Files as users write them, each traced for a GPU, and as this CPU runs it beside the step really run here."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from foretell.errors import ModelError
from foretell.simulate.memory.replay import peak_live
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record import memos
from foretell.trace.record.capture import capture
from foretell.trace.record.on_cpu import measure_on_cpu, trace_as_cpu
from foretell.trace.sandbox.blame import step_error
from foretell.trace.types import Trace
from tests.further import further
from tests.pure.as_cpu import here

FOLDER = Path(__file__).resolve().parents[1] / "data" / "userfiles"
FILES = sorted(file.stem for file in FOLDER.glob("*.py"))
REFUSED = {
    "other_complex": ("Unsupported dtype BFloat16", "--precision fp32"),
    "refused_sparse": ("sparse gradients", "--optimizer sgd"),
    "takes_lstsq": ("to have the same dtype", "--precision fp32"),
}
"""What a GPU refuses too, and what is proposed."""
BY_DATA = {
    "capacity_moe", "copy_dino", "loop_until", "loop_seq2seq", "read_layerdrop", "read_branch", "shape_graph",
    "shape_tokens", "shape_detect", "shape_moe", "decode_loop", "quant_vqvae", "points_net", "ode_rejects", "loop_sinkhorn",
}  # fmt: skip
"""How much is done depends on what a trained model computes, or on a draw: the trace says what it takes it to be."""
NOT_HERE = {
    "copy_byol": "the record of this CPU's allocator does not show that what was made before it is freed",
    "other_hooks": "the same",
    "other_flex": "no backward on CPUs",
    "other_nested": "other kernels on CPUs",
    "other_script": "TorchScript keeps for backward what it likes",
    "move_amp": "CPUs do not cast for their own autograd functions",
    "refused_sparse": "AdamW refuses it here too",
}
"""Steps that this CPU does not run, or not so that they can be compared."""
RUN = {
    "batch_pair", "checks_shapes", "copy_saved", "dataset_text", "defaults_global", "hessian_pinn", "loop_halting", "match_detr",
    "move_cuda_calls", "ode_adaptive", "other_parallel", "quant_aware", "read_numpy", "shape_mlm", "shape_spans", "shape_voxels",
    "solve_gp",
}  # fmt: skip
"""One of each kind."""
HERE = {"checks_shapes", "other_parallel"}
"""Of these, whose steps `make test` runs."""
LONG = {
    "init_dcgan", "loop_until", "mask_simclr", "other_ensemble", "other_flex", "other_func", "other_hessian", "other_hooks", "other_lazy",
    "other_nested", "other_penalty", "other_script", "other_subclass", "packed_pointer", "points_net", "policy_ppo", "rays_nerf",
    "read_branch", "shape_moe", "swin_masks",
}  # fmt: skip
"""Files whose traces for a GPU take seconds."""
TWINS = {
    "copy_byol", "copy_clones", "copy_dino", "copy_encoder", "copy_translator", "loop_seq2seq", "loop_sinkhorn", "move_half", "move_in_forward",
    "move_mnist", "move_streams", "ode_rejects", "quant_vqvae", "read_guards", "read_layerdrop", "read_lengths", "read_schedule", "read_sizes",
    "shape_ctc", "shape_detect", "shape_graph", "shape_packed", "shape_tokens", "batch_dataclass", "batch_loader", "other_parametrize",
    "loss_named", "loss_tuple", "takes_two",
}  # fmt: skip
"""Others of a kind of which a file is traced; some are traced by the tests at the end."""
ALIKE = pytest.mark.slow(reason="its step is traced above, and real steps of files of other kinds, or of the same kind, are run")
LONGER = pytest.mark.slow(reason="its step takes long; those of two other files are run")
FP32 = Recipe(precision="fp32")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Files set defaults for the whole process."""
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    tf32 = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cuda.matmul.allow_tf32 = tf32
    gc.collect()  # and set aside, as conftest.py does after a file: every trace looks through the objects that are left
    memos._caches.look()
    gc.freeze()


def source(name: str) -> Source:
    return Source(model=str(FOLDER / f"{name}.py"), micro_batch=4)


def traced(name: str) -> Trace:
    return capture(lambda: load(source(name)), Recipe())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", further(FILES, {*FILES} - TWINS - LONG - (RUN - BY_DATA), "seconds, or like another, or run below"))
def test_a_step_for_a_gpu_has_an_answer(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name in REFUSED:
        said, remedy = REFUSED[name]
        with pytest.raises(RuntimeError, match=said) as caught:
            traced(name)
        told = step_error(str(FOLDER / f"{name}.py"), caught.value)
        assert isinstance(told, ModelError) and remedy in told.remedy
        return
    trace = traced(name)
    assert peak_live(trace, tuple(trace.schedule)) > 0
    assert name not in BY_DATA or trace.meta["assumed"], "what depends on data is told"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in HERE else LONGER if name in RUN else ALIKE)
        for name in FILES if name not in NOT_HERE and name not in BY_DATA
    ],
)
def test_peak_bytes_are_those_of_the_step_run_here(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    trace = trace_as_cpu(source(name), FP32)
    random.seed(0)
    np.random.seed(0)
    with here():
        measured = measure_on_cpu(source(name), FP32)[0]
    predicted = peak_live(trace, tuple(trace.schedule))
    assert predicted == pytest.approx(measured, rel=0.01)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", further(["read_layerdrop", "shape_graph", "loop_seq2seq"], ["read_layerdrop"], "another file, traced twice"))
def test_two_traces_are_the_same(name: str) -> None:
    assert traced(name).programs == traced(name).programs


@pytest.mark.filterwarnings("ignore")
def test_nothing_of_a_trace_stays_behind() -> None:
    before = (
        torch.cuda.is_available, torch.Tensor.to, torch.compile, torch.tensor, torch.nn.Module._apply, torch.load, torch.Generator,
        torch.nn.parallel.DistributedDataParallel, torch.nn.UninitializedParameter.__new__,
    )  # fmt: skip
    state, drawn = torch.get_rng_state(), random.getstate()
    traced("move_streams")
    assert before == (
        torch.cuda.is_available, torch.Tensor.to, torch.compile, torch.tensor, torch.nn.Module._apply, torch.load, torch.Generator,
        torch.nn.parallel.DistributedDataParallel, torch.nn.UninitializedParameter.__new__,
    )  # fmt: skip
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == drawn
    assert "__deepcopy__" not in vars(torch._subclasses.FakeTensor)

"""Op lists of a release of torch without a GPU: its wheel for CUDA on fake CUDA tensors, over a stand-in for the CUDA runtime.

    pip install --no-deps --target wheel torch==2.12.1                     any release; the wheel with CUDA, without its CUDA packages
    python benchmarks/releases.py stand-in wheel include out               libraries that report a device and do nothing; needs gcc
    LD_LIBRARY_PATH=out PYTHONPATH=wheel:. python benchmarks/releases.py record 2.12.json.gz
    LD_LIBRARY_PATH=out PYTHONPATH=wheel:. python benchmarks/releases.py attention choices.json

`include` is a folder with the headers of the CUDA runtime. Fake tensors have no memory and run no kernel, so that what is seen is
torch's own choice of ops: autocast, attention, norms, optimizers. What kernels do inside (workspaces) is not. FAKE_CC names
the compute capability (90) and FAKE_CUDNN the version of cuDNN (91900) that the stand-in reports. Recurrent layers call cuDNN while
their ops are chosen and cannot be recorded so. Held against the lists recorded on an H200 with 2.11, 33 of 34 are equal; the 34th
has `one_hot`, which fake tensors compute another way.
"""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

HEAD = """#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
static int cc(void) { const char *s = getenv("FAKE_CC"); return s ? atoi(s) : 90; }
cudaError_t cudaGetDeviceCount(int *n) { *n = 1; return 0; }
cudaError_t cudaGetDevice(int *n) { *n = 0; return 0; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p); strcpy(p->name, "stand-in"); p->major = cc() / 10; p->minor = cc() % 10;
  p->totalGlobalMem = 150109880320ull; p->multiProcessorCount = 132; p->warpSize = 32; p->maxThreadsPerMultiProcessor = 2048;
  p->maxThreadsPerBlock = 1024; p->sharedMemPerBlock = 49152; p->sharedMemPerBlockOptin = 232448; p->regsPerBlock = 65536;
  return 0; }
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
  *v = a == cudaDevAttrComputeCapabilityMajor ? cc() / 10 : a == cudaDevAttrComputeCapabilityMinor ? cc() % 10 : 0; return 0; }
cudaError_t cudaDriverGetVersion(int *v) { *v = 13000; return 0; }
cudaError_t cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }
cudaError_t cudaMemGetInfo(size_t *f, size_t *t) { *f = *t = 150109880320ull; return 0; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *a, int *b) { *a = 0; *b = -5; return 0; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *v) { *v = 0; return 0; }
cudaError_t cudaMalloc(void **p, size_t n) { *p = aligned_alloc(2097152, (n + 2097151) / 2097152 * 2097152); return 0; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  memset(a, 0, sizeof *a); a->type = cudaMemoryTypeDevice; return 0; }
cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) { strncpy(s, "0000:00:00.0", n); return 0; }
const char *cudaGetErrorString(cudaError_t e) { return "stand-in"; }
const char *cudaGetErrorName(cudaError_t e) { return "stand-in"; }
static void *handle;
void **__cudaRegisterFatBinary(void *p) { return &handle; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *s, void **p, unsigned v, unsigned long long f, enum cudaDriverEntryPointQueryResult *q) {
  *p = dlsym(dlopen("libcuda.so.1", RTLD_NOW), s); if (q) *q = 0; return 0; }
"""
CUDNN = """#include <stdio.h>
#include <stdlib.h>
static int version(void) { const char *s = getenv("FAKE_CUDNN"); return s ? atoi(s) : 91900; }
unsigned long cudnnGetVersion(void) { return version(); }
unsigned long cudnnGetCudartVersion(void) { return 13000; }
int cudnnGetProperty(int t, int *v) { *v = t == 0 ? version() / 10000 : t == 1 ? version() / 100 % 100 : version() % 100; return 0; }
"""
MODELS = ("norms", "attention", "images", "pointwise", "losses", "encoder")
RECIPES: dict[str, dict[str, Any]] = {
    **{name: {"precision": name, "optimizer": "adamw-fused" if name.startswith("fp16") else "adamw"}
       for name in ("fp32", "bf16-autocast", "fp16-autocast", "bf16")},
    **{name: {"precision": "bf16-autocast", "optimizer": name, "clip": 1.0, "accumulate": 2}
       for name in ("adam", "adam-loop", "adamw-foreach", "momentum-fused")},
    **{name: {"precision": "bf16-autocast", "recompute": name} for name in ("full", "selective")},
}  # fmt: skip
CASES = (
    "norms-fp32", "norms-bf16-autocast", "norms-fp16-autocast", "norms-bf16", "attention-fp32", "attention-bf16-autocast", "attention-bf16",
    "images-fp32", "images-bf16-autocast", "pointwise-bf16-autocast", "losses-bf16-autocast", "losses-fp16-autocast", "encoder-bf16-autocast",
    "encoder-fp16-autocast", "encoder-adam", "encoder-adam-loop", "encoder-adamw-foreach", "encoder-momentum-fused", "encoder-full",
    "encoder-selective",
)  # fmt: skip
AXES: dict[str, list[Any]] = {
    "dtype": ["bfloat16", "float16", "float32"], "head": [8, 60, 64, 96, 128, 192, 256], "lengths": [[128, 128], [1, 128], [128, 77]],
    "mask": [None, "bool", "bcast"], "dropout": [0.0, 0.1], "causal": [False, True], "grad": [True, False], "gqa": [False, True],
}  # fmt: skip
CHOICES = ["math", "flash", "efficient", "cudnn"]


def stand_in(wheel: Path, include: Path, out: Path) -> None:
    """Libraries with every symbol that torch's own ask for: those of the runtime say yes, all others end the process."""
    out.mkdir(parents=True, exist_ok=True)
    libraries = sorted((wheel / "torch" / "lib").glob("*.so*"))
    wanted = {name for path in libraries for name in _symbols(path, "--undefined-only")}
    given = {name for path in libraries for name in _symbols(path, "--defined-only")}
    missing = sorted(name for name in wanted - given if name.startswith(("cu", "nccl", "nvshmem", "nvrtc", "nvJit", "nvml", "__cuda")))
    written = {name for name in missing if f"{name}(" in HEAD or f"{name}(" in CUDNN}
    runtime = [name for name in missing if (name.startswith(("cuda", "__cuda", "cupti")) or name[2:3].isupper()) and name not in written]
    rest = [name for name in missing if name not in runtime and name not in written]
    driver = sorted({word for path in libraries for word in _words(path) if word.startswith("cu") and word[2:3].isupper()})
    _built(out / "libcudart.so.13", HEAD, include)
    _built(out / "libcuplain.so", "".join(f"int {name}(void) {{ return 0; }}\n" for name in runtime), include)
    ended = 'int {0}(void) {{ fprintf(stderr, "{0} was called\\n"); abort(); }}\n'
    _built(out / "libcublas.so.13", CUDNN + "".join(map(ended.format, rest)), include)
    _built(out / "libcuda.so.1", "".join(f"int {name}(void) {{ return 0; }}\n" for name in driver), include)
    needed = {name for path in libraries for name in _needed(path) if name.startswith(("libcu", "libnv", "libnccl")) and ".so." in name}
    for name in sorted(needed - {path.name for path in libraries} - {"libcudart.so.13", "libcublas.so.13"}):
        _built(out / name, "", include, out / "libcublas.so.13", out / "libcuplain.so")


def _symbols(path: Path, which: str) -> list[str]:
    found = subprocess.run(["nm", "-D", which, str(path)], capture_output=True, text=True, check=False).stdout
    return [line.split()[-1].partition("@")[0] for line in found.splitlines() if line.split()]


def _words(path: Path) -> list[str]:
    found = subprocess.run(["strings", "-n", "6", str(path)], capture_output=True, text=True, check=False).stdout
    others = ("cublas", "cudnn", "cufft", "cusolver", "cusparse", "cuda")
    return [word for word in found.split() if word.isidentifier() and word.isascii() and not word.startswith(others)]


def _needed(path: Path) -> list[str]:
    found = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=False).stdout
    return [line.partition("[")[2].rstrip("]") for line in found.splitlines() if "NEEDED" in line]


def _built(path: Path, text: str, include: Path, *others: Path) -> None:
    linked = ["-Wl,--no-as-needed", *map(str, others)] if others else []
    options = ["-w", "-shared", "-fPIC", f"-I{include}", "-o", str(path), f"-Wl,-soname,{path.name}", "-x", "c", "-", "-x", "none", *linked]
    subprocess.run(["gcc", *options], input=text, text=True, check=True)


# ---------------------------------------------------------------------- recording


def ops_of(model: str, recipe: dict[str, Any]) -> list[Any]:
    """Ops of the second step on fake CUDA tensors: name, inputs, outputs."""
    from dataclasses import replace
    from unittest import mock

    import torch
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map

    from foretell.trace.load.model import Source, load
    from foretell.trace.recipe import Recipe
    from foretell.trace.record.capture import no_initialisation
    from foretell.trace.record.step import Step

    found: list[Any] = []

    class Copied(FakeTensorMode):
        def __deepcopy__(self, _: Any) -> Copied:
            return self

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = function(*args, **(kwargs or {}))
            if str(function) != "prim.device.default":
                found.append([str(function), specs((args, kwargs)), specs(output)])
            return output

    def specs(values: Any) -> list[Any]:
        return [[list(t.shape), str(t.dtype)[6:]] for t in tree_leaves(values) if isinstance(t, torch.Tensor)]

    def moved(value: Any) -> Any:
        if isinstance(value, nn.Parameter):
            return nn.Parameter(torch.empty_like(value, device="cuda"), value.requires_grad)
        return torch.empty_like(value, device="cuda") if isinstance(value, torch.Tensor) else value

    supported = [torch.Tensor, nn.Parameter, FakeTensor]
    users = ("torch.utils._foreach_utils", "torch.optim.optimizer")
    with Copied(), mock.patch(f"{users[0]}._foreach_supported_types", supported), mock.patch(f"{users[1]}._foreach_supported_types", supported):
        with no_initialisation():
            step = Step(load(Source(model=model, micro_batch=4)), Recipe(**recipe), device_type="cuda")
        for module in step.model.modules():
            module._parameters.update({name: moved(value) for name, value in module._parameters.items()})
            module._buffers.update({name: moved(value) for name, value in module._buffers.items()})
        step.workload = replace(step.workload, batch=tree_map(moved, step.workload.batch))
        step.create_optimizer()
        _step(step)
        step.zero_grad()
        with Mode():
            _step(step)
    return found


def _step(step: Any) -> None:
    for _ in range(step.recipe.accumulate):
        step.micro_batch()
    step.update()


def record(path: Path) -> None:
    import torch

    names: dict[str, int] = {}
    specs: dict[str, int] = {}
    cases = {}
    for case in CASES:
        kind, _, how = case.partition("-")
        model, rows = f"tests/data/many_ops.py:{kind}", []
        for name, *ends in ops_of(model, RECIPES[how]):
            rows.append([names.setdefault(name, len(names)), *([specs.setdefault(json.dumps(one), len(specs)) for one in end] for end in ends)])
        cases[case] = {"model": model, "source": {"micro_batch": 4}, "recipe": RECIPES[how], "ops": rows}
        print(case, len(rows), flush=True)
    about = {"torch": torch.__version__, "device": "none: fake CUDA tensors, compute capability 9.0", "date": time.strftime("%Y-%m-%d")}
    data = {**about, "names": list(names), "specs": [json.loads(one) for one in specs], "cases": cases}
    path.write_bytes(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), 9, mtime=0))


def attention(path: Path) -> None:
    """Which kernel is chosen, over AXES; a line of digits as CHOICES has them."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Chosen(Exception):
        pass

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(function)
            if name.startswith("aten._scaled_dot_product_") or name == "aten.bmm.default":
                raise Chosen(next((one for one in CHOICES if one in name), "math"))
            return function(*args, **(kwargs or {}))

    found = []
    with FakeTensorMode():
        for name, head, (queries, keys), kind, dropout, causal, grad, gqa in itertools.product(*AXES.values()):
            if causal and (kind or queries != keys):
                continue
            dtype = getattr(torch, name)
            query = torch.empty(2, 8, queries, head, dtype=dtype, device="cuda", requires_grad=grad)
            key = torch.empty(2, 2 if gqa else 8, keys, head, dtype=dtype, device="cuda", requires_grad=grad)
            shape = (1, 1, queries, keys) if kind == "bcast" else (2, 8, queries, keys)
            mask = torch.empty(shape, dtype=torch.bool if kind == "bool" else dtype, device="cuda") if kind else None
            try:
                with Mode():
                    torch.nn.functional.scaled_dot_product_attention(query, key, key, mask, dropout, causal, enable_gqa=gqa)
            except Chosen as chosen:
                found.append(str(CHOICES.index(str(chosen))))
    capability = list(torch.cuda.get_device_capability())
    path.write_text(json.dumps({"torch": torch.__version__, "capability": capability, "choices": "".join(found)}))


def main() -> None:
    warnings.simplefilter("ignore")
    what, *where = sys.argv[1:]
    {"stand-in": stand_in, "record": record, "attention": attention}[what](*map(Path, where))


if __name__ == "__main__":
    main()

"""Times the steps of a benchmark's script from outside, with and without `foretell watch`: means over a window between two waits
for the device, one process at a time. On PYTHONPATH of the script; other Pythons pass it by."""

import contextlib
import fcntl
import importlib.util
import json
import os
import sys
import time


class _AfterTorch:
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec("torch")
        plain = found.loader.exec_module

        def exec_module(module):
            plain(module)
            _time_steps(module)

        found.loader.exec_module = exec_module
        return found


def _time_steps(torch):
    from torch.optim import optimizer as optimizers

    file, seconds = os.environ["BENCH_TIMES"], float(os.environ["BENCH_SECONDS"])
    warm, least = int(os.environ["BENCH_WARM"]), int(os.environ["BENCH_LEAST"])
    state = {"step": 0, "lock": None, "first": None, "began": 0.0, "from": 0}
    init = optimizers.Optimizer.__init__

    def wait():
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def made(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if state["lock"] is None:  # from here on nobody else computes
            state["lock"] = open(os.environ["BENCH_LOCK"], "w")  # noqa: SIM115  # held until the process ends
            fcntl.flock(state["lock"], fcntl.LOCK_EX)

    def stepped(optimizer, args, kwargs):
        state["first"] = state["first"] or id(optimizer)
        if id(optimizer) != state["first"]:
            return
        state["step"] += 1
        if state["step"] == warm:
            wait()
            state["began"], state["from"] = time.perf_counter(), state["step"]
        elif state["step"] >= warm + least and time.perf_counter() - state["began"] >= seconds:
            wait()
            taken, steps = time.perf_counter() - state["began"], state["step"] - state["from"]
            with open(file, "w") as out:
                json.dump({"step_seconds": taken / steps, "steps": steps}, out)
            fcntl.flock(state["lock"], fcntl.LOCK_UN)  # workers of a loader have it too
            raise SystemExit(0)

    optimizers.Optimizer.__init__ = made
    optimizers.register_optimizer_step_post_hook(stepped)


_words = sys.orig_argv
if os.environ.get("BENCH_TIMES") and "foretell" not in _words and any(word.endswith(os.environ["BENCH_SCRIPT"]) for word in _words):
    with contextlib.suppress(Exception):
        sys.meta_path.insert(0, _AfterTorch())

"""Inside a watched script of a benchmark: its steps run in blocks, with the hooks of `foretell watch` on and off in turn.

    first optimizer made    wait until it is this script's turn: nothing else computes meanwhile
    warm-up                 hooks on, as in any watched run; how long a step takes decides how many make a block
    pairs of blocks         one with the hooks and one without, in random order; the device is waited for at the edges only
    time is up              the blocks are written down, and the script ends

The time that the hooks were off is taken out of their clocks, so that they read memory and tell as often a second as always.
On PYTHONPATH of the script; other Pythons pass it by."""

import atexit
import contextlib
import importlib.util
import json
import os
import random
import sys
import time
from pathlib import Path

WARM, EDGE, BLOCK_SECONDS = 12, 5, float(os.environ.get("BENCH_BLOCK_SECONDS", "0.1"))
FEWEST, MOST = 2, 400


class _AfterTorch:
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec("torch")
        plain = found.loader.exec_module

        def exec_module(module):
            plain(module)
            Blocks(module).install()

        found.loader.exec_module = exec_module
        return found


class Blocks:
    def __init__(self, torch):
        self.torch, self.file, self.seconds = torch, Path(os.environ["BENCH_TIMES"]), float(os.environ["BENCH_SECONDS"])
        self.first, self.step, self.size = None, 0, 0
        self.watch, self.on, self.off_since = None, True, 0.0
        self.began = self.block_began = 0.0
        self.left = 0
        self.rows, self.inside = [], [0, 0.0]
        self.turns, self.random = [], random.Random(0)
        self.owner = os.getpid()

    def install(self):
        from torch.optim import optimizer as optimizers

        init, waited = optimizers.Optimizer.__init__, []

        def made(optimizer, *args, **kwargs):
            init(optimizer, *args, **kwargs)
            if not waited:
                waited.append(True)
                self.wait_for_turn()

        optimizers.Optimizer.__init__ = made
        optimizers.register_optimizer_step_pre_hook(self.stepping)  # before the step: hooks after it may be changed then
        atexit.register(self.write)

    def wait_for_turn(self):
        self.file.with_suffix(".ready").touch()
        while not self.file.with_suffix(".go").exists():
            time.sleep(0.02)

    def stepping(self, optimizer, args, kwargs):
        self.first = self.first or id(optimizer)
        if id(optimizer) != self.first:
            return
        self.step += 1
        if self.step == WARM - EDGE:
            self.began = self.edge()
        elif self.step == WARM:
            each = (self.edge() - self.began) / EDGE
            self.size = max(FEWEST, min(MOST, round(BLOCK_SECONDS / each)))
            self.watch = sys.modules["_foretell_watch.hooks"].installed
            self.time_hooks()
            self.began = time.perf_counter()
            self.next_block()
        elif self.step > WARM:
            self.left -= 1
            if not self.left:
                self.rows.append([self.on, (self.edge() - self.block_began) / self.size])
                if len(self.rows) % 2 == 0 and time.perf_counter() - self.began > self.seconds:
                    self.write()
                    raise SystemExit(0)
                self.next_block()

    def edge(self):
        if self.torch.cuda.is_initialized():
            self.torch.cuda.synchronize()
        return time.perf_counter()

    def next_block(self):
        if not self.turns:
            self.turns = self.random.sample((True, False), 2)
        on, now = self.turns.pop(), time.perf_counter()
        if on and not self.on:
            self.watch.attach()
            self.watch.pause()
            for name in ("_next_sample", "_next_event", "_next_look"):
                setattr(self.watch, name, getattr(self.watch, name) + now - self.off_since)
        elif self.on and not on:
            self.watch.remove()
            self.off_since = now
        self.on, self.left, self.block_began = on, self.size, time.perf_counter()

    def time_hooks(self):
        """The host's seconds inside of the hooks, by themselves: where the host is what a step waits for, that is what they cost."""
        for name in ("_stepped", "_mark"):
            setattr(self.watch, name, self.timed(getattr(self.watch, name)))
        self.watch.remove()
        self.watch.attach()  # with those

    def timed(self, plain):
        clock = time.perf_counter

        def hook(*args):
            begun = clock()
            plain(*args)
            self.inside[0] += 1
            self.inside[1] += clock() - begun

        return hook

    def write(self):
        if self.owner == os.getpid() and self.rows:
            self.file.write_text(json.dumps({"block_steps": self.size, "blocks": self.rows, "inside": self.inside}))
            self.rows = []


_words = sys.orig_argv
if os.environ.get("BENCH_TIMES") and "foretell" not in _words and any(word.endswith(os.environ["BENCH_SCRIPT"]) for word in _words):
    with contextlib.suppress(Exception):
        sys.meta_path.insert(0, _AfterTorch())

"""The pool of gloo ranks: calls do not touch each other, failures come back, nothing is left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from foretell.errors import UserError
from foretell.runtime.process.pool import PoolWorld, RankFailure
from tests import forks

ROOT = Path(__file__).resolve().parents[2]


def total(rank: int, world: int, scale: float) -> tuple[int, float]:
    value = torch.tensor([scale * (rank + 1)])
    dist.all_reduce(value)
    return os.getpid(), value.item()


def nothing(rank: int, world: int) -> int:
    return rank


def threads(rank: int, world: int, most: int | None = None) -> int:
    """How many there are once they are as few as `most`, or, without one, once none has ended for a while: a group's own end
    only when they are next given a core."""
    seen = [len(os.listdir("/proc/self/task"))]
    until = time.monotonic() + 30
    while (len(seen) < 10 or len(set(seen[-10:])) > 1) if most is None else seen[-1] > most:
        if time.monotonic() > until:
            break
        time.sleep(0.05)
        seen.append(len(os.listdir("/proc/self/task")))
    return seen[-1]


def matrix(rank: int, world: int, shape: tuple[int, ...], axis: str, others: int) -> torch.Tensor:
    """A product split over one axis of a mesh: wrong as soon as it reduces over the wrong group."""
    for _ in range(others):
        dist.new_group([0])  # group names depend on how many there were
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))[axis]
    torch.manual_seed(0)
    left, right = torch.randn(4, 8), torch.randn(8, 4)
    product = distribute_tensor(left, mesh, [Shard(1)]) @ distribute_tensor(right, mesh, [Shard(0)])
    assert isinstance(product, DTensor)
    return product.full_tensor() - left @ right


def fail(rank: int, world: int, who: int) -> None:
    if rank == who:
        raise UserError("a problem", "a remedy")
    dist.barrier()


def die(rank: int, world: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep(rank: int, world: int) -> None:
    time.sleep(60)


def test_ranks_add_up_and_are_used_again(ranks: Callable[[int], PoolWorld]) -> None:
    first, second = ranks(2).run(total, 1.0), ranks(3).run(total, 2.0)
    assert [value for _, value in first] == [3.0, 3.0] and [value for _, value in second] == [12.0] * 3
    assert [pid for pid, _ in first] == [pid for pid, _ in second][:2]


@pytest.mark.parametrize("times", [3, pytest.param(10, marks=pytest.mark.slow(reason="the same more often"))])
def test_a_rank_with_nothing_to_do_does_not_hang_up_on_the_others(times: int, ranks: Callable[[int], PoolWorld]) -> None:
    """One that is done before another has connected to all used to fail the call, most of all on a busy machine."""
    for _ in range(times):
        assert ranks(4).run(nothing) == [0, 1, 2, 3]


def test_meshes_of_one_call_are_unknown_to_the_next(ranks: Callable[[int], PoolWorld]) -> None:
    for shape, axis, others in [((2, 2), "a", 0), ((2, 2), "a", 1), ((1, 4), "b", 2), ((2, 2), "b", 3)]:
        for difference in ranks(4).run(matrix, shape, axis, others):
            assert difference.abs().max() < 1e-5


def test_a_failure_names_its_rank_and_the_pool_goes_on(ranks: Callable[[int], PoolWorld]) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks(3).run(fail, 1)
    assert "a problem" in caught.value.errors[1] and "in fail" in caught.value.errors[1]
    assert isinstance(caught.value.causes[1], UserError)
    assert len(ranks(3).run(total, 1.0)) == 3


def test_a_rank_that_dies_is_named_and_replaced(ranks: Callable[[int], PoolWorld]) -> None:
    with pytest.raises(RankFailure, match="rank 1: died, ended by signal 9"):
        ranks(2).run(die)
    assert [value for _, value in ranks(2).run(total, 1.0)] == [3.0, 3.0]


def test_a_call_that_does_not_end_is_ended(ranks: Callable[[int], PoolWorld]) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match="did not answer in time"):
        ranks(2).run(sleep, timeout_s=1.0)
    assert time.monotonic() - start < 10
    assert [value for _, value in ranks(2).run(total, 1.0)] == [3.0, 3.0]


def test_no_rank_outlives_the_process_that_asked(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(
        "from foretell.runtime.process.pool import Pool\n"
        "import time\n"
        "def work(rank, world, folder):\n"
        "    import os, pathlib\n"
        "    (pathlib.Path(folder) / f'pid{rank}').write_text(str(os.getpid()))\n"
        "    time.sleep(300)\n"
        "if __name__ == '__main__':\n"
        f"    Pool().ranks(2).run(work, {str(tmp_path)!r}, timeout_s=300)\n"
    )
    asks = f"import runpy\nfrom tests import forks\nforks.share_ranks()\nrunpy.run_path({str(script)!r}, run_name='__main__')"
    child = forks.Command(env={**os.environ, "PYTHONPATH": str(ROOT)}, code=asks)
    noted = [tmp_path / "pid0", tmp_path / "pid1"]
    until = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in noted):
        assert child.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    child.kill()
    child.communicate()
    until = time.monotonic() + 10
    while alive := [path for path in noted if Path(f"/proc/{path.read_text()}").exists()]:
        assert time.monotonic() < until, f"{alive} still run"
        time.sleep(0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted where the kernel shows them")
def test_calls_leave_no_threads_behind(ranks: Callable[[int], PoolWorld]) -> None:
    """Every process group has three, which wake up a hundred times a second."""
    world = ranks(4)
    world.run(matrix, (2, 2), "a", 0)
    before = max(world.run(threads))
    for axis, shape in (("a", (2, 2)), ("b", (2, 2)), ("a", (4, 1)), ("b", (1, 4))):
        world.run(matrix, shape, axis, 1)
    assert max(world.run(threads, before)) <= before

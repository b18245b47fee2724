"""python starts.py fork: starts its own two processes; they train together, and the second fails where it is asked to."""
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP


def work(rank, store, fails):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = DDP(torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        model(torch.randn(32, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if fails and rank == 1:
        raise MemoryError("out of memory, as asked")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert "FORETELL_WATCH" not in os.environ and "observe" not in os.environ.get("PYTHONPATH", "")
    mp.start_processes(work, args=(os.path.abspath("store"), "fails" in sys.argv), nprocs=2, start_method=sys.argv[1])
    print("both ended")

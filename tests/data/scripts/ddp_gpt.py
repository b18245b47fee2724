"""torchrun --nproc_per_node=8 ddp_gpt.py --accumulate 4"""
import argparse, contextlib, logging, math, os, time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from gpt_scaler import GPT, Text

log = logging.getLogger("train")


def setup():
    dist.init_process_group(backend="nccl", init_method="env://")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    return dist.get_rank(), local_rank, dist.get_world_size()


def lr_at(step, warmup=10, total=1000):
    return (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * step / total))


def loss_of(model, x, y):
    logits = model(x)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=6e-4)
    args = parser.parse_args()
    rank, local_rank, world = setup()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    torch.manual_seed(1337 + rank)
    device = torch.device("cuda", local_rank)
    model = GPT(8192, 256, 4, 4, 128).to(device)
    model = DDP(model, device_ids=[local_rank], output_device=local_rank, gradient_as_bucket_view=True)
    data = Text(2000, 128, 8192)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, num_workers=2, pin_memory=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_at)
    scaler = torch.amp.GradScaler("cuda")
    if os.path.exists("checkpoint.pt"):
        state = torch.load("checkpoint.pt", map_location=device)
        model.module.load_state_dict(state["model"])
    begun = time.time()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for i, (x, y) in enumerate(loader):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            last = (i + 1) % args.accumulate == 0
            with contextlib.nullcontext() if last else model.no_sync():
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = loss_of(model, x, y) / args.accumulate
                scaler.scale(loss).backward()
            if not last:
                continue
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            log.info("epoch %d step %d loss %.3f %.1f s", epoch, i, mean.item() * args.accumulate, time.time() - begun)
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

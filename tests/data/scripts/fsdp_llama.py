"""torchrun --nproc-per-node 8 fsdp_llama.py"""
import argparse, math, os, time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Tokens(Dataset):
    def __init__(self, count, length, vocab):
        self.count, self.length, self.vocab = count, length, vocab

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        row = torch.randint(0, self.vocab, (self.length + 1,), generator=g)
        return {"inputs": row[:-1], "targets": row[1:]}


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.wq, self.wk = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wv, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (w(x).view(b, t, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(dim, heads), nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.gate, self.up, self.down = (nn.Linear(*size, bias=False) for size in ((dim, 3 * dim), (dim, 3 * dim), (3 * dim, dim)))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, vocab=4096, dim=256, depth=4, heads=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def init_weights(self):
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.trunc_normal_(p, std=0.02)


def shard(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    return model


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    total, count = torch.zeros((), device=device), 0
    for batch in loader:
        out = model(batch["inputs"].to(device))
        total += F.cross_entropy(out.flatten(0, 1).float(), batch["targets"].to(device).flatten())
        count += 1
        if count == 4:
            break
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    model.train()
    return total.item() / count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    rank, local_rank, world = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("dp",))
    with torch.device("meta"):
        model = Llama()
    shard(model, mesh)
    model.to_empty(device=device)
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, (s + 1) / 10) * 0.5 * (1 + math.cos(math.pi * s / args.steps)))
    data = Tokens(1024, args.seq, 4096)
    sampler = DistributedSampler(data, world, rank, shuffle=True)
    loader = DataLoader(data, args.batch, sampler=sampler, num_workers=2, pin_memory=True)
    if rank == 0:
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters, loss before {evaluate(model, loader, device):.3f}")
    else:
        evaluate(model, loader, device)
    begun = time.perf_counter()
    for step, batch in zip(range(args.steps), loader):
        inputs, targets = batch["inputs"].to(device), batch["targets"].to(device)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.3f} norm {norm.item():.2f} {time.perf_counter() - begun:.1f} s")
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(state, "llama.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

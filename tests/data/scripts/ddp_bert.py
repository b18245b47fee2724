"""python -m torch.distributed.run --nnodes 2 --nproc_per_node 4 ddp_bert.py"""
import argparse, os, random

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm
from transformers import BertConfig, BertModel, get_linear_schedule_with_warmup


class Tagger(torch.nn.Module):
    def __init__(self, config, labels):
        super().__init__()
        self.bert = BertModel(config)  # its pooler is not used
        self.out = torch.nn.Linear(config.hidden_size, labels)

    def forward(self, ids, mask, labels):
        hidden = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        logits = self.out(hidden)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def corpus(path="corpus.pt"):
    if dist.get_rank() == 0 and not os.path.exists(path):
        torch.save("tokens", path)
    dist.barrier()
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 2000, (640, 96), generator=g)
    return TensorDataset(ids, torch.ones_like(ids), torch.randint(0, 9, ids.shape, generator=g))


def main(args):
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}")
    torch.cuda.set_device(device)
    random.seed(args.seed + rank)
    torch.manual_seed(args.seed + rank)
    config = BertConfig(vocab_size=2000, hidden_size=192, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512, max_position_embeddings=128)
    model = Tagger(config, 9).to(device)
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[local_rank], find_unused_parameters=True, bucket_cap_mb=5)
    plain = [p for n, p in model.named_parameters() if "bias" in n or "LayerNorm" in n]
    decayed = [p for n, p in model.named_parameters() if not ("bias" in n or "LayerNorm" in n)]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], lr=args.lr)
    data = corpus()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler)
    scheduler = get_linear_schedule_with_warmup(optimizer, 10, args.epochs * len(loader))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        bar = tqdm(loader, disable=rank != 0)
        for step, batch in enumerate(bar):
            ids, mask, labels = (one.to(device) for one in batch)
            model.require_backward_grad_sync = (step + 1) % args.accumulate == 0
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(ids, mask, labels) / args.accumulate
            loss.backward()
            if (step + 1) % args.accumulate == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.3f}")
        losses = [None] * dist.get_world_size()
        dist.all_gather_object(losses, loss.item())
        if rank == 0:
            torch.save(model.module.state_dict(), "tagger.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--seed", type=int, default=42)
    main(parser.parse_args())

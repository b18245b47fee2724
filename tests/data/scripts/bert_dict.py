"""Batches as dictionaries out of a collate function, lengths that differ, a frozen part, fused AdamW, bf16 autocast, a progress bar."""

import argparse
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm


class Sentences(Dataset):
    def __init__(self, count):
        draw = random.Random(0)
        self.rows = [([draw.randrange(5, 2000) for _ in range(draw.randrange(20, 96))], draw.randrange(3)) for _ in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def collate(rows):
    longest = max(len(words) for words, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    for place, (words, _) in enumerate(rows):
        ids[place, : len(words)] = torch.tensor(words)
    return {"ids": ids, "mask": ids == 0, "labels": torch.tensor([label for _, label in rows])}


class Classifier(nn.Module):
    def __init__(self, width=192, depth=3):
        super().__init__()
        self.words, self.places = nn.Embedding(2000, width), nn.Embedding(128, width)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 3)

    def forward(self, ids, mask):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        x = self.encoder(x, src_key_padding_mask=mask)
        return self.head(x[:, 0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--freeze-embeddings", action="store_true")
    args = parser.parse_args()
    device = "cuda"
    model = Classifier().to(device)
    if args.freeze_embeddings:
        model.words.requires_grad_(False)
    loader = DataLoader(Sentences(400), args.batch_size, collate_fn=collate, num_workers=2, pin_memory=True)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-4, fused=True)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(2):
        bar = tqdm(loader, desc=f"epoch {epoch}")
        for batch in bar:
            batch = {key: value.to(device, non_blocking=True) for key, value in batch.items()}
            with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
                loss = criterion(model(batch["ids"], batch["mask"]), batch["labels"])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            bar.set_postfix(loss=f"{loss.item():.3f}", peak=torch.cuda.max_memory_allocated() >> 20)
        torch.save(model.state_dict(), f"epoch{epoch}.pt")

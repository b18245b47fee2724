import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
loader = DataLoader(TensorDataset(torch.randn(1000, 256), torch.randint(0, 10, (1000,))), batch_size=32, shuffle=True)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, s / 100))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
bar = tqdm(range(len(loader)), disable=not accelerator.is_local_main_process)
for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        bar.update(1)
        bar.set_postfix(loss=loss.item())

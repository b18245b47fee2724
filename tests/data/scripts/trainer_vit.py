"""A Trainer of one's own: class weights in compute_loss, an optimizer with two rates, a callback, a frozen part; the model by AutoModel from a folder."""

import json
import os

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification, Trainer, TrainerCallback, TrainingArguments

FOLDER = "vit-small"


class Pictures(torch.utils.data.Dataset):
    def __init__(self, count, size):
        self.count, self.size, self.draw = count, size, np.random.default_rng(3)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"pixel_values": self.draw.random((3, self.size, self.size), dtype=np.float32), "labels": index % 3}


def collate(rows):
    return {"pixel_values": torch.from_numpy(np.stack([row["pixel_values"] for row in rows])), "labels": torch.tensor([row["labels"] for row in rows])}


class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits, labels, weight=torch.tensor([1.0, 2.0, 3.0], device=labels.device))
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, model=None):
        head = [p for n, p in self.model.named_parameters() if n.startswith("classifier")]
        body = [p for n, p in self.model.named_parameters() if not n.startswith("classifier") and p.requires_grad]
        self.optimizer = torch.optim.AdamW([{"params": body, "lr": self.args.learning_rate}, {"params": head, "lr": 10 * self.args.learning_rate}], fused=True)
        return self.optimizer


class Tell(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % 10 == 0:
            print("step", state.global_step, "allocated", torch.cuda.memory_allocated())


def main():
    os.makedirs(FOLDER, exist_ok=True)
    settings = dict(
        model_type="vit", hidden_size=96, num_hidden_layers=3, num_attention_heads=3, intermediate_size=384, image_size=64, patch_size=16, num_channels=3
    )
    with open(os.path.join(FOLDER, "config.json"), "w") as file:
        json.dump(settings, file)
    config = AutoConfig.from_pretrained(FOLDER, num_labels=3)
    model = AutoModelForImageClassification.from_pretrained(FOLDER, config=config)
    model.vit.embeddings.requires_grad_(False)
    arguments = TrainingArguments(
        output_dir="vit-out", per_device_train_batch_size=20, gradient_accumulation_steps=3, bf16=True, max_grad_norm=0.0, learning_rate=2e-4,
        remove_unused_columns=False, num_train_epochs=2, logging_strategy="steps", logging_steps=1, save_strategy="no", report_to=[],
    )
    Weighted(model=model, args=arguments, train_dataset=Pictures(240, 64), data_collator=collate, callbacks=[Tell()]).train()


if __name__ == "__main__":
    main()

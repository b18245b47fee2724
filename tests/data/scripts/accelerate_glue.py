"""Fine-tuning without a Trainer: accelerate, batches as BatchEncoding, decay groups, warmup, evaluation of every epoch and once before, trackers."""

import argparse
import logging
import math
import os

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import BatchEncoding, RobertaConfig, RobertaForSequenceClassification, SchedulerType, get_scheduler

logger = get_logger(__name__)


def parse_args():
    parser = argparse.ArgumentParser(description="Finetune a model on a text classification task")
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--max_length", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=3)
    parser.add_argument("--lr_scheduler_type", type=SchedulerType, default="linear")
    parser.add_argument("--num_warmup_steps", type=int, default=5)
    parser.add_argument("--output_dir", type=str, default="glue-out")
    parser.add_argument("--with_tracking", action="store_true")
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    logging.basicConfig(format="%(asctime)s - %(levelname)s - %(name)s - %(message)s", level=logging.INFO)
    logger.info(accelerator.state, main_process_only=False)
    set_seed(11)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.wait_for_everyone()
    config = RobertaConfig(
        vocab_size=800, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512, max_position_embeddings=80, num_labels=2
    )
    model = RobertaForSequenceClassification(config)
    rows = [{"ids": [(7 * n + k) % 700 + 5 for k in range(args.max_length)], "label": n % 2} for n in range(300)]

    def collate(picked):
        ids = torch.tensor([row["ids"] for row in picked])
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([row["label"] for row in picked])})

    train_dataloader = DataLoader(rows[:256], shuffle=True, collate_fn=collate, batch_size=args.per_device_train_batch_size)
    eval_dataloader = DataLoader(rows[256:], collate_fn=collate, batch_size=2 * args.per_device_train_batch_size)
    no_decay = ["bias", "LayerNorm.weight"]
    groups = [
        {"params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)], "weight_decay": args.weight_decay},
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
    steps = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps) * args.num_train_epochs
    lr_scheduler = get_scheduler(name=args.lr_scheduler_type, optimizer=optimizer, num_warmup_steps=args.num_warmup_steps, num_training_steps=steps)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    progress_bar = tqdm(range(steps), disable=not accelerator.is_local_main_process)

    def evaluate():
        model.eval()
        right = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
            right += (predictions == references).sum().item()
        return right

    logger.info(f"before training: {evaluate()}")
    for epoch in range(args.num_train_epochs):
        model.train()
        total_loss = 0
        for step, batch in enumerate(train_dataloader):
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                progress_bar.update(1)
        logger.info(f"epoch {epoch}: {evaluate()}")
        accelerator.unwrap_model(model).save_pretrained(args.output_dir, save_function=accelerator.save)


if __name__ == "__main__":
    main()

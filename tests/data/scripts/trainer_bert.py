"""transformers' Trainer with evaluation, a metric, gradient checkpointing and fp16; a model from its configuration."""

import argparse

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __init__(self, count, length):
        self.ids = np.random.default_rng(0).integers(5, 500, (count, length))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": torch.tensor(self.ids[index]), "attention_mask": torch.ones(self.ids.shape[1], dtype=torch.long), "labels": index % 2}


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    config = BertConfig(vocab_size=500, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, max_position_embeddings=64)
    model = BertForSequenceClassification(config)
    arguments = TrainingArguments(
        output_dir="bert-out", per_device_train_batch_size=args.batch, fp16=True, gradient_checkpointing=True, num_train_epochs=1,
        eval_strategy="epoch", save_strategy="epoch", logging_steps=1, report_to=[], learning_rate=3e-4, warmup_steps=10,
    )
    Trainer(model=model, args=arguments, train_dataset=Rows(256, 64), eval_dataset=Rows(64, 64), compute_metrics=accuracy).train()


if __name__ == "__main__":
    main()

"""A Llama of random weights trained by transformers' Trainer."""
import argparse

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=4)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--length", type=int, default=1024)
parser.add_argument("--vocab", type=int, default=32000)
parser.add_argument("--steps", type=int, default=100000)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--checkpoint", action="store_true")
given = parser.parse_args()


class Tokens(Dataset):
    def __len__(self):
        return given.steps * given.per_device_train_batch_size * given.gradient_accumulation_steps

    def __getitem__(self, place):
        row = torch.randint(0, given.vocab, (given.length,))
        return {"input_ids": row, "labels": row}


config = LlamaConfig(
    vocab_size=given.vocab, hidden_size=given.width, intermediate_size=given.width * 8 // 3 // 64 * 64 or 64, num_hidden_layers=given.layers,
    num_attention_heads=max(1, given.width // 64), num_key_value_heads=max(1, given.width // 64), max_position_embeddings=given.length,
)
arguments = TrainingArguments(
    output_dir="trained", per_device_train_batch_size=given.per_device_train_batch_size,
    gradient_accumulation_steps=given.gradient_accumulation_steps,
    max_steps=given.steps, bf16=given.bf16, gradient_checkpointing=given.checkpoint, report_to=[], save_strategy="no", logging_steps=50,
    disable_tqdm=True, dataloader_num_workers=2, optim="adamw_torch",
)
Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=Tokens()).train()

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from torch.utils.data import Dataset


class Texts(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, i):
        ids = torch.randint(0, 1000, (64,))
        return {"input_ids": ids, "labels": ids}


model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_layer=2, n_embd=128, n_head=4, n_positions=64))
args = TrainingArguments(output_dir="out", per_device_train_batch_size=8, gradient_accumulation_steps=2, bf16=True, max_steps=20, logging_steps=5, report_to=[], dataloader_num_workers=2)
Trainer(model=model, args=args, train_dataset=Texts()).train()

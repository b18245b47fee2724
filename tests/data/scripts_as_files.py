"""What the scripts beside train, as functions that `foretell fit file.py:function` takes: model, batch, loss in one tuple."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "scripts"))


def gpt_scaler():
    from gpt_scaler import GPT

    batch = {"x": torch.randint(0, 8192, (8, 256)), "y": torch.randint(0, 8192, (8, 256))}
    return GPT(8192, 512, 4, 8, 256), batch, lambda out, batch: F.cross_entropy(out.flatten(0, 1), batch["y"].flatten())


class Twins(nn.Module):
    """A model and the mean of its past."""

    def __init__(self, model):
        super().__init__()
        self.model, self.ema = model, copy.deepcopy(model).requires_grad_(False)

    def forward(self, x):
        return self.model(x)


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.bn = nn.BatchNorm2d(64)
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        return self.fc(self.bn(self.c2(F.relu(self.c1(x)))).relu().mean((2, 3)))


def conv_ema():
    batch = {"x": torch.randn(64, 3, 32, 32), "y": torch.randint(0, 10, (64,))}
    return Twins(Conv()), batch, lambda out, batch: F.cross_entropy(out, batch["y"], label_smoothing=0.1)


def accelerate_mlp():
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10))
    return model, {"input": torch.randn(32, 256), "y": torch.randint(0, 10, (32,))}, lambda out, batch: F.cross_entropy(out, batch["y"])


def accelerate_vit():
    from accelerate_vit import ViT

    return ViT(), {"x": torch.randn(32, 3, 64, 64), "y": torch.randint(0, 10, (32,))}, lambda out, batch: F.cross_entropy(out, batch["y"])


def recompute_hydra():
    from recompute_hydra import Config, Net

    c = Config()
    x = torch.randn(c.batch, c.length, 32, dtype=torch.bfloat16)
    more = {f"unused{n}": torch.randn(c.batch, c.length, 32, dtype=torch.bfloat16) for n in range(3)}
    return Net(c), {"x": x, **more}, lambda out, batch: F.mse_loss(out, batch["x"])


def bert_dict():
    from bert_dict import Classifier, Sentences, collate

    rows = Sentences(400)
    batch = collate([rows[n] for n in range(24)])
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    return Classifier(), batch, lambda out, batch: criterion(out, batch["labels"])


def trainer_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = torch.randint(0, 1000, (8, 64))
    config = GPT2Config(vocab_size=1000, n_layer=2, n_embd=128, n_head=4, n_positions=64, use_cache=False)
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(512)}


def trainer_bert():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=500, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, max_position_embeddings=64
    )
    batch = {"input_ids": torch.randint(5, 500, (16, 64)), "attention_mask": torch.ones(16, 64, dtype=torch.long)}
    return BertForSequenceClassification(config), {**batch, "labels": torch.randint(0, 2, (16,))}


def lightning_mlp():
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return net, {"input": torch.randn(64, 3, 32, 32), "y": torch.randint(0, 10, (64,))}, lambda out, batch: F.cross_entropy(out, batch["y"])


def lightning_images():
    from lightning_images import ResNet

    return ResNet(), {"x": torch.randn(32, 3, 32, 32), "y": torch.randint(0, 10, (32,))}, lambda out, batch: F.cross_entropy(out, batch["y"])


# --- of several ranks: one rank's model, batch and loss ----------------------------------------------------------------


def ddp_gpt():
    from gpt_scaler import GPT

    batch = {"x": torch.randint(0, 8192, (4, 128)), "y": torch.randint(0, 8192, (4, 128))}
    return GPT(8192, 256, 4, 4, 128), batch, lambda out, batch: F.cross_entropy(out.view(-1, out.size(-1)), batch["y"].view(-1))


def ddp_images():
    from ddp_images import Net

    batch = {"x": torch.randn(32, 3, 32, 32), "y": torch.randint(0, 100, (32,))}
    return Twins(Net(32, 100)), batch, lambda out, batch: F.cross_entropy(out, batch["y"], label_smoothing=0.1)


def ddp_bert():
    from ddp_bert import Tagger
    from transformers import BertConfig

    sizes = {"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
    config = BertConfig(vocab_size=2000, max_position_embeddings=128, **sizes)
    ids = torch.randint(5, 2000, (16, 96))
    return Tagger(config, 9), {"ids": ids, "mask": torch.ones_like(ids), "labels": torch.randint(0, 9, ids.shape)}


def ddp_spawn():
    from ddp_spawn import Deep

    return Deep(), {"x": torch.randn(128, 256), "y": torch.randn(128)}, lambda out, batch: F.mse_loss(out, batch["y"])


def _llama(rows, length, **size):
    from fsdp_llama import Llama

    batch = {"ids": torch.randint(0, 4096, (rows, length)), "targets": torch.randint(0, 4096, (rows, length))}
    return Llama(**size), batch


def fsdp_llama():
    return *_llama(4, 256), lambda out, batch: F.cross_entropy(out.flatten(0, 1), batch["targets"].flatten())


def fsdp_ends():
    return *_llama(8, 128, depth=3), lambda out, batch: F.cross_entropy(out.flatten(0, 1).float(), batch["targets"].flatten())


def fsdp_vit():
    from accelerate_vit import ViT

    return ViT(), {"x": torch.randn(16, 3, 64, 64), "y": torch.randint(0, 10, (16,))}, lambda out, batch: F.cross_entropy(out, batch["y"])


def fsdp_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    from foretell.trace.step import cast_floats

    drops = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=3000, n_layer=3, n_embd=192, n_head=4, n_positions=128, use_cache=False, **drops))
    model.register_forward_hook(lambda _, args, output: cast_floats(output, torch.float32))
    ids = torch.randint(0, 3000, (4, 128))
    return model, {"input_ids": ids, "labels": ids}

"""What the scripts beside train, as functions that `foretell fit file.py:function` takes: model, batch, loss in one tuple."""

from __future__ import annotations

import copy
import itertools
import sys
import types
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "scripts"))


def gpt_scaler():
    from gpt_scaler import GPT

    batch = {"x": torch.randint(0, 8192, (8, 256)), "y": torch.randint(0, 8192, (8, 256))}
    return GPT(8192, 512, 4, 8, 256), batch, lambda out, batch: F.cross_entropy(out.flatten(0, 1), batch["y"].flatten())


def holding(loss):
    """Variables of the script hold what the model returned, and the loss, until the next time."""
    held = {}

    def kept(out, batch):
        held["out"] = out
        held["loss"] = loss(out, batch)
        return held["loss"]

    return kept


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
    batch = collate([rows[n] for n in range(24, 48)])  # the second one, which is longer
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


def ddp_forecast():
    from ddp_forecast import Forecaster

    batch = {"past": torch.randn(64, 192, 7), "future": torch.randn(64, 24)}
    return Forecaster(7, 192, 6, 24), batch, lambda out, batch: F.huber_loss(out, batch["future"])


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

    from foretell.trace.record.step import cast_floats

    drops = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=3000, n_layer=3, n_embd=192, n_head=4, n_positions=128, use_cache=False, **drops))
    model.register_forward_hook(lambda _, args, output: cast_floats(output, torch.float32))
    ids = torch.randint(0, 3000, (4, 128))
    return model, {"input_ids": ids, "labels": ids}
def lightning_manual():
    from lightning_manual import Classifier, Settings

    model = Classifier(Settings())
    model.average = copy.deepcopy(model.head).requires_grad_(False)
    batch = {"signal": torch.randn(48, 8, 256), "label": torch.randint(0, 5, (48,))}
    return model, batch, lambda out, batch: F.cross_entropy(out, batch["label"])


def lightning_fabric():
    from lightning_fabric import Encoder, contrast

    class Cast(Encoder):
        """Fabric gives a model its batch in the low precision."""

        def forward(self, first, second):
            first, second = first.bfloat16(), second.bfloat16()
            return super().forward(first, second)

    model = Cast(32)
    return model, {"first": torch.rand(64, 3, 48, 48), "second": torch.rand(64, 3, 48, 48)}, lambda out, batch: contrast(*out, model.temperature)


def trainer_t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=512, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4, decoder_start_token_id=0, dropout_rate=0.1
    )
    mask = (torch.arange(48) < 12).long().repeat(12, 1)
    batch = {"input_ids": torch.randint(0, 99, (12, 48)), "attention_mask": mask}
    batch |= {"decoder_input_ids": torch.zeros(12, 16, dtype=torch.long), "labels": torch.randint(0, 99, (12, 16))}

    def smoothed(out, batch):
        """As transformers' LabelSmoother has it."""
        log_probs, labels = -F.log_softmax(out.logits, dim=-1), batch["labels"].unsqueeze(-1)
        padding = labels.eq(-100)
        labels = torch.clamp(labels, min=0)
        one, all_of_them = log_probs.gather(dim=-1, index=labels), log_probs.sum(dim=-1, keepdim=True, dtype=torch.float32)
        one.masked_fill_(padding, 0.0)
        all_of_them.masked_fill_(padding, 0.0)
        count = padding.numel() - padding.long().sum()
        return 0.9 * one.sum() / count + 0.1 * all_of_them.sum() / (count * log_probs.shape[-1])

    class Unlabelled(T5ForConditionalGeneration):
        def forward(self, input_ids, attention_mask, decoder_input_ids):
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids)

    return Unlabelled(config), batch, smoothed


def trainer_vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=96, num_hidden_layers=3, num_attention_heads=3, intermediate_size=384, image_size=64, patch_size=16, num_channels=3, num_labels=3
    )
    model = ViTForImageClassification(config)
    model.vit.embeddings.requires_grad_(False)
    batch = {"pixel_values": torch.rand(20, 3, 64, 64), "target": torch.randint(0, 3, (20,))}
    weight = torch.tensor([1.0, 2.0, 3.0])
    return model, batch, lambda out, batch: F.cross_entropy(out.logits, batch["target"], weight=weight)


def accelerate_glue():
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        vocab_size=800, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512, max_position_embeddings=80, num_labels=2
    )
    batch = {"input_ids": torch.randint(5, 700, (16, 64)), "attention_mask": torch.ones(16, 64, dtype=torch.long)}
    return RobertaForSequenceClassification(config), {**batch, "labels": torch.randint(0, 2, (16,))}


def accelerate_diffusion():
    from accelerate_diffusion import UNet

    class Cast(UNet):
        """accelerate gives back what a model returns in fp32."""

        def forward(self, x, timesteps):
            return super().forward(x, timesteps).float()

    model = Cast()
    model.enable_gradient_checkpointing()
    shadow = [nn.Parameter(p.clone().detach(), requires_grad=False) for p in model.parameters()]
    model.shadow = nn.ParameterList(shadow)
    batch = {"x": torch.randn(24, 3, 32, 32), "timesteps": torch.randint(0, 1000, (24,)), "noise": torch.randn(24, 3, 32, 32)}
    batch |= {"clean": torch.randn(24, 3, 32, 32), "alphas": torch.rand(1000), "share": torch.rand(24, 1, 1, 1)}
    return model, batch, holding(lambda out, batch: F.mse_loss(out, batch["noise"]))


def closure_pinn():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = (2, 96, 96, 96)
            self.inner = nn.ModuleList(nn.Linear(one, other) for one, other in itertools.pairwise(sizes))
            self.last = nn.Linear(96, 1)

        def net(self, x):
            for layer in self.inner:
                x = torch.sin(layer(x))
            return self.last(x)

        def forward(self, inside, edge, wanted):
            u = self.net(inside.requires_grad_())
            (du,) = torch.autograd.grad(u.sum(), inside, create_graph=True)
            (ddu,) = torch.autograd.grad(du[:, 0].sum(), inside, create_graph=True)
            residual = du[:, 1:] - 0.1 * ddu[:, :1]
            return residual.square().mean() + (self.net(edge) - wanted).square().mean()

    batch = {"inside": torch.rand(2048, 2), "edge": torch.rand(256, 2), "wanted": torch.rand(256, 1)}
    return Residual().double(), {name: one.double() for name, one in batch.items()}


def timm_style():
    from timm_style import SoftTargetCrossEntropy, create_model

    loss = SoftTargetCrossEntropy()
    batch = {"x": torch.randn(32, 3, 64, 64), "target": torch.randint(0, 10, (32,)), "soft": torch.rand(32, 10)}
    return Twins(create_model("tiny_effnet", drop_rate=0.1)), batch, lambda out, batch: loss(out, batch["soft"])


def gpt_compiled():
    source = (Path(__file__).parent / "scripts" / "gpt_compiled.py").read_text()
    module = sys.modules["gpt_compiled"] = types.ModuleType("gpt_compiled")  # imported, it would train
    sys.argv = ["gpt_compiled.py"]
    exec(source.partition("os.makedirs(out_dir")[0], vars(module))
    config = module.GPTConfig(n_layer=3, n_head=4, n_embd=128, block_size=128)
    ids = {name: torch.randint(0, 512, (6, 128)) for name in ("idx", "targets", "next_idx", "next_targets")}
    return module.GPT(config), ids, holding(lambda out, batch: out[1])

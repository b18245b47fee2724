"""Watching from inside a loop: a context, Lightning's and Trainer's callbacks. Each predicts by tracing what it was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import foretell
from foretell.report import comparison

WIDTH, BATCH, STEPS = 64, 512, 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x))


def mean_square(output: torch.Tensor, batch: Any = None) -> torch.Tensor:
    return output.square().mean()


def trained(watching: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with watching:
        for _ in range(STEPS):
            mean_square(model(torch.randn(BATCH, WIDTH))).backward()
            optimizer.step()
            optimizer.zero_grad()


def counted(run: Path) -> float:
    """Bytes of tensors that were predicted; the comparison must be one, with the step measured."""
    from foretell.plan import file

    found = comparison.of_folder(run)
    assert found.comparable and found.steps + found.skipped_steps >= STEPS - 3
    return float(file.read(run / "plan.json").predicted["allocated_bytes"])


def test_a_loop_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(*[Block() for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    weights = sum(one.numel() for one in model.parameters())
    trained(foretell.watch(model, optimizer, loss=mean_square, out=tmp_path / "run"), model, optimizer)
    told = capsys.readouterr().err.splitlines()
    assert all(line.startswith("foretell: ") for line in told) and "predicted" in told[0]
    least = 4 * (4 * weights + 4 * BATCH * WIDTH)  # weights, gradients, two moments; what each block keeps at least
    assert least < counted(tmp_path / "run") < 3 * least
    assert not model._forward_pre_hooks and torch.autograd.backward.__module__ == "torch.autograd"


def test_without_a_loss_nothing_is_predicted_and_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(foretell.watch(model, optimizer, out=tmp_path / "run"), model, optimizer)
    assert "returns no loss; give foretell.watch(model, optimizer, loss=...)" in capsys.readouterr().err
    found = comparison.of_folder(tmp_path / "run")
    assert not found.comparable and found.steps > 0


def test_an_error_in_the_loop_goes_on_and_leaves_a_folder(tmp_path: Path) -> None:
    model = nn.Sequential(Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        for _ in range(4):
            mean_square(model(torch.randn(8, WIDTH))).backward()
            optimizer.step()
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), foretell.watch(model, optimizer, predict=False, out=tmp_path / "run"):
        loop()
    assert comparison.of_folder(tmp_path / "run").steps > 0


@pytest.mark.slow(reason="another library; a loop of one's own is above, Trainer below")
def test_lightning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(Block(), nn.Linear(WIDTH, 10))

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    data = TensorDataset(torch.randn(BATCH * STEPS, WIDTH), torch.randint(0, 10, (BATCH * STEPS,)))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    callback = foretell.lightning_callback(out=tmp_path / "run")
    trainer = lightning.Trainer(max_steps=STEPS, accelerator="cpu", callbacks=[callback], default_root_dir=tmp_path, **quiet)
    trainer.fit(Model(), DataLoader(data, batch_size=BATCH))
    assert "predicted" in capsys.readouterr().err
    assert counted(tmp_path / "run") > 4 * BATCH * WIDTH


def test_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")

    class Tokens(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 4 * STEPS

        def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
            row = torch.full((16,), place)
            return {"input_ids": row, "labels": row}

    config = transformers.GPT2Config(vocab_size=100, n_layer=2, n_embd=32, n_head=2, n_positions=16)
    asked = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, max_steps=STEPS, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    transformers.Trainer(model=model, args=asked, train_dataset=Tokens(), callbacks=[foretell.trainer_callback(out=tmp_path / "run")]).train()
    assert "predicted" in capsys.readouterr().err
    assert counted(tmp_path / "run") > 16 * sum(one.numel() for one in model.parameters())

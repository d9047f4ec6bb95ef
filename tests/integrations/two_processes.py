"""Run by two processes: DDP of a framework under a policy, on gloo. `python two_processes.py FRAMEWORK FOLDER`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from digits_training import CLIP, LR, POLICY, micro_batches, network
from torch.utils.data import DataLoader

NUM_STEPS = 24


def own(rank: int) -> list[Any]:
    """Every second micro-batch: together the two have those of a plain loop that accumulates over two."""
    return list(micro_batches(2 * NUM_STEPS))[rank::2]


def save(net: torch.nn.Module, scale: float, folder: Path, rank: int) -> None:
    torch.save({"weights": net.state_dict(), "scale": scale}, folder / f"rank{rank}.pt")


def with_lightning(folder: Path) -> None:
    import lightning

    from autoprec.integrations.lightning import PolicyPrecision

    class Digits(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def train_dataloader(self) -> Any:
            return DataLoader(own(self.trainer.global_rank), batch_size=None)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=LR)

    module, plugin = Digits(), PolicyPrecision(POLICY, module="model")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    shared = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    trainer = lightning.Trainer(
        **quiet, **shared, plugins=plugin, max_epochs=1, gradient_clip_val=CLIP, default_root_dir=folder
    )
    trainer.fit(module)
    assert plugin.scaler is not None
    save(module.model, plugin.scaler.get_scale(), folder, trainer.global_rank)


def with_accelerate(folder: Path) -> None:
    from autoprec.integrations.accelerate import PolicyAccelerator

    accelerator = PolicyAccelerator(POLICY, cpu=True)
    assert accelerator.num_processes == 2
    net = network()
    model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=LR))
    for images, labels in own(accelerator.process_index):
        accelerator.backward(F.cross_entropy(model(images), labels))
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    assert accelerator.scaler is not None
    save(net, accelerator.scaler.get_scale(), folder, accelerator.process_index)
    accelerator.end_training()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    {"lightning": with_lightning, "accelerate": with_accelerate}[sys.argv[1]](Path(sys.argv[2]))

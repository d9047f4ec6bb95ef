"""What a user's file for `--task lightning:...` and `--task trainer:...` holds."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from digits_training import Network, digits
from torch.utils.data import DataLoader, Subset


def digits_module() -> Any:
    import lightning

    class Digits(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Network()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = F.cross_entropy(self.model(batch[0]), batch[1])
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            logits = self.model(batch[0])
            values = {"val_loss": F.cross_entropy(logits, batch[1])}
            self.log_dict(values | {"val_accuracy": (logits.argmax(1) == batch[1]).float().mean()})

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-7)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch"}}

    class Data(lightning.LightningDataModule):
        def setup(self, stage: str) -> None:
            self.train, self.held_out = Subset(digits(), range(640)), Subset(digits(), range(640, 880))

        def train_dataloader(self) -> Any:
            return DataLoader(self.train, batch_size=32, shuffle=True)

        def val_dataloader(self) -> Any:
            return DataLoader(self.held_out, batch_size=64)

    return Digits(), Data(), {"metric_name": "val_accuracy", "max_grad_norm": 1.0}


def nothing() -> Any:
    return torch.nn.Linear(1, 1)


def manual_module() -> Any:
    module, data, _ = digits_module()
    module.automatic_optimization = False
    return module, data


def misspelt_field() -> Any:
    module, data, _ = digits_module()
    return module, data, {"max_grad_nrom": 1.0}


def misspelt_metric() -> Any:
    module, data, _ = digits_module()
    return module, data, {"metric_name": "val_acuracy"}


def waiting_schedule() -> Any:
    module, data, _ = digits_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    module.configure_optimizers = lambda: ([optimizer], [schedule])
    return module, data


def topics_trainer(**arguments: Any) -> Any:
    import tempfile

    from test_hf_trainer import Passages, model
    from transformers import Trainer, TrainingArguments

    settings: dict[str, Any] = {
        "output_dir": tempfile.gettempdir(),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "learning_rate": 2e-3,
        "optim": "adamw_torch",
        "max_grad_norm": 0.7,
        "warmup_steps": 1,
        "metric_for_best_model": "accuracy",
        "use_cpu": True,
        "report_to": "none",
    }
    torch.rand(3)  # a user's own random numbers
    return Trainer(
        model=model(seed=int(torch.randint(1000, ()))),
        args=TrainingArguments(**settings | arguments),
        train_dataset=Passages(),
        eval_dataset=Passages(held_out=True),
        compute_metrics=lambda found: {
            "first": 0.0,
            "accuracy": float((found.predictions.argmax(1) == found.label_ids).mean()),
        },
    )


def half_trainer() -> Any:
    return topics_trainer(bf16=True)


def trainer_without_data() -> Any:
    trainer = topics_trainer()
    trainer.eval_dataset = None
    return trainer


def trainer_with_optimizer() -> Any:
    trainer = topics_trainer()
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    return trainer


def free_names() -> Any:
    """Lightning passes the index of a batch by position, whatever a step calls it."""
    module, data, fields = digits_module()
    base = type(module)

    class Named(base):  # type: ignore[misc,valid-type]
        def training_step(self, b: Any, i: int) -> torch.Tensor:
            loss: torch.Tensor = base.training_step(self, b, i)
            return loss

        def validation_step(self, b: Any, i: int, dataloader_idx: int = 0) -> None:
            base.validation_step(self, b, i)

    return Named(), data, fields

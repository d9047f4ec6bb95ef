"""A Trainer of transformers with its data set, as a task: `--task trainer:path/to/file.py:function`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from autoprec.apply.structure import unwrap
from autoprec.errors import TaskError, did_you_mean
from autoprec.tasks.loading import call_own, fixed_seed, kept_random_states
from autoprec.tasks.protocol import Batch, OptimizersOfModel, Task

__all__ = ["trainer_task"]

_SECOND_SETTINGS = ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval")


def trainer_task(function: Callable[[], Any], *, name: str) -> Task:
    """Make a task of the Trainer that the function returns.

    Loss, optimizer, schedule, clipping, accumulation and batch sizes are the Trainer's own; its own loop does not run.
    A fresh model is `model_init` of the Trainer where it has one, else that of another call of the function. Weights
    in half precision become FP32 masters.

    Args:
        function: returns a `transformers.Trainer` with `train_dataset` and `eval_dataset`.
        name: stands for it in messages.

    Raises:
        TaskError: transformers is not installed; the function raises or returns something else; a data set is missing;
            `TrainingArguments` with a precision of their own, or an optimizer that was built already.
    """
    try:
        from transformers import Trainer
    except ImportError:
        raise TaskError(f"{name}: transformers is not installed: pip install 'autoprec[hf,accelerate]'") from None
    with fixed_seed():
        trainer = _made(function, Trainer, name)
        _check(trainer, name)
        parts = _Parts(function, Trainer, trainer, name)
        train, held_out = trainer.get_train_dataloader(), trainer.get_eval_dataloader()
    args = trainer.args
    metric = _metric(trainer)
    return Task(
        name=type(unwrap(trainer.model)).__name__,
        model=parts.model,
        train_batches=_opened(train, args.per_device_train_batch_size, shuffle=True),
        eval_batches=_opened(held_out, args.per_device_eval_batch_size, shuffle=False),
        loss=parts.loss,
        evaluate=parts.evaluate,
        metric_name=metric or "held-out loss",
        metric_direction="minimize" if metric is None or args.greater_is_better is False else "maximize",
        optimizer=OptimizersOfModel(parts.build_optimizer),
        scheduler=parts.scheduler,
        max_grad_norm=args.max_grad_norm if args.max_grad_norm > 0 else None,
        accumulation_steps=args.gradient_accumulation_steps,
        num_tokens=_num_tokens if "input_ids" in next(iter(train)) else None,
        lift_half_parameters=True,
    )


def _made(function: Callable[[], Any], kind: type, name: str) -> Any:
    trainer = call_own(function, {}, name=name)
    if not isinstance(trainer, kind):
        raise TaskError(f"{name} returned {type(trainer).__name__}; a transformers.Trainer is needed")
    return trainer


def _check(trainer: Any, name: str) -> None:
    given = [setting for setting in _SECOND_SETTINGS if getattr(trainer.args, setting, False)]
    if given or trainer.accelerator.mixed_precision != "no" or hasattr(trainer, "policy_setting"):
        found = f"TrainingArguments({given[0]}=True)" if given else "a precision setting of its own"
        raise TaskError(f"{name}: the Trainer has {found}; leave it out, the search decides the precision")
    for field in ("train_dataset", "eval_dataset"):
        if getattr(trainer, field) is None:
            raise TaskError(f"{name}: the Trainer has no {field}")
    if isinstance(trainer.eval_dataset, dict):
        raise TaskError(f"{name}: the Trainer has {len(trainer.eval_dataset)} evaluation sets; one is needed")
    if trainer.optimizer is not None:
        raise TaskError(
            f"{name}: the Trainer got an optimizer that was built already, for one model; give optim=... in"
            " TrainingArguments or optimizer_cls_and_kwargs, so that every trial builds its own"
        )
    if trainer.args.activation_checkpointing:
        raise TaskError(f"{name}: activation_checkpointing is set by --checkpoint here; leave it out of the arguments")


def _opened(loader: Any, batch_size: int, *, shuffle: bool) -> DataLoader[Any]:
    """Return the Trainer's loader without Accelerate's wrapper, whose order would be the same under every seed."""
    is_iterable = isinstance(loader.dataset, IterableDataset)
    return DataLoader(
        loader.dataset,
        batch_size=batch_size,
        shuffle=shuffle and not is_iterable,
        collate_fn=loader.collate_fn,
        drop_last=loader.drop_last,
        num_workers=loader.num_workers,
    )


def _num_tokens(batch: Batch) -> int:
    mask = batch.get("attention_mask")
    return int(batch["input_ids"].numel() if mask is None else mask.sum())


def _metric(trainer: Any) -> str | None:
    """Return the name of the metric; None where the Trainer computes none."""
    if trainer.compute_metrics is None:
        return None
    return str(trainer.args.metric_for_best_model or "").removeprefix("eval_") or "metric"


@dataclass(eq=False)
class _Parts:
    """The functions of the task, by the Trainer's own methods."""

    function: Callable[[], Any]
    kind: type
    trainer: Any
    name: str

    def model(self) -> nn.Module:
        if self.trainer.model_init is not None:
            return self.trainer.call_model_init()  # type: ignore[no-any-return]
        with kept_random_states():  # a Trainer seeds them all when it is built, after its model
            return _made(self.function, self.kind, self.name).model  # type: ignore[no-any-return]

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return self.trainer.compute_loss(model, dict(batch))  # type: ignore[no-any-return]

    def evaluate(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Any]:
        """Return the loss, and of a Trainer that computes metrics its metric of the batch."""
        loss, outputs = self.trainer.compute_loss(model, dict(batch), return_outputs=True)
        if self.trainer.compute_metrics is None:
            return loss, loss
        return loss, self._metric_of(self._predictions(model, outputs), batch)

    def _predictions(self, model: nn.Module, outputs: Any) -> tuple[Any, ...]:
        config = getattr(unwrap(model), "config", None)
        ignored = [*getattr(config, "keys_to_ignore_at_inference", ["past_key_values"]), "loss"]
        if isinstance(outputs, Mapping):
            return tuple(value for key, value in outputs.items() if key not in ignored)
        return tuple(outputs[1:])

    def _metric_of(self, predictions: tuple[Any, ...], batch: Batch) -> Any:
        from transformers import EvalPrediction

        trainer = self.trainer
        labels = tuple(batch[label] for label in trainer.label_names if label in batch)
        found: Any = _single(predictions)
        if trainer.preprocess_logits_for_metrics is not None:
            found = trainer.preprocess_logits_for_metrics(found, _single(labels))
        values = trainer.compute_metrics(EvalPrediction(predictions=_numpy(found), label_ids=_numpy(_single(labels))))
        wanted = _metric(trainer)
        if wanted == "metric":
            return next(iter(values.values()))
        key = wanted if wanted in values else f"eval_{wanted}"
        if key not in values:
            raise TaskError(
                f"{self.name}: metric_for_best_model is {wanted!r}, and compute_metrics returned {', '.join(values)}"
                f"{did_you_mean(str(wanted), values)}"
            )
        return values[key]

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.trainer.optimizer = None
        try:
            return self.trainer.create_optimizer(unwrap(model))  # type: ignore[no-any-return]
        finally:
            self.trainer.optimizer = None

    def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        self.trainer.lr_scheduler = None
        try:
            return self.trainer.create_scheduler(num_steps, optimizer)
        finally:
            self.trainer.lr_scheduler = None


def _single(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values


def _numpy(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_numpy(item) for item in value)
    return value.detach().float().cpu().numpy() if value.is_floating_point() else value.cpu().numpy()

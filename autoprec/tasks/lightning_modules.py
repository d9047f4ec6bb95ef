"""A LightningModule with its data, as a task: `--task lightning:path/to/file.py:function`.

The function returns `(module, datamodule)`; a third item may be a dict of `Task` fields (accumulation, clipping, the
target shape), and `metric_name` there is the name that `validation_step` logs its metric under.
"""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoprec.apply.structure import unwrap
from autoprec.errors import TaskError, did_you_mean
from autoprec.tasks.loading import call_own, fixed_seed
from autoprec.tasks.protocol import Batch, OptimizersOfModel, Task

__all__ = ["lightning_task"]

_SCHEDULE = "_autoprec_schedule"


def lightning_task(function: Callable[[], Any], *, name: str) -> Task:
    """Make a task of what the function returns; it is called again for each fresh model.

    The training step, validation step, optimizer and schedule are the module's own, the batches the data module's. No
    `Trainer` runs: `self.log` keeps what a validation step logs, and anything else of `self.trainer` is an error of
    Lightning's own.

    Args:
        function: returns a LightningModule and a LightningDataModule, and optionally a dict of `Task` fields.
        name: stands for it in messages.

    Raises:
        TaskError: Lightning is not installed; the function raises or returns something else; manual optimization,
            several loaders, or a schedule that waits for a metric.
    """
    try:
        import lightning
    except ImportError:
        raise TaskError(f"{name}: Lightning is not installed: pip install 'autoprec[lightning]'") from None
    kinds = (lightning.LightningModule, lightning.LightningDataModule)
    with fixed_seed():
        module, data, fields = _split(call_own(function, {}, name=name), kinds, name)
        parts = _Parts(function, name, kinds, metric_name=fields.get("metric_name"))
        parts.check(module)
        loaders = _Loaders(data)
        loaders.start()
        parts.steps_per_epoch = loaders.steps_per_epoch(fields.get("accumulation_steps", 1))
        parts.fresh(module).build_optimizers(module)
    made: dict[str, Any] = {
        "name": type(module).__name__,
        "model": parts.model,
        "train_batches": loaders.train,
        "eval_batches": loaders.held_out,
        "loss": parts.loss,
        "evaluate": parts.evaluate,
        "metric_name": "held-out loss",
        "metric_direction": "minimize",
        "optimizer": OptimizersOfModel(parts.build_optimizers),
        "scheduler": parts.scheduler if parts.has_scheduler else None,
    }
    chosen = {"metric_direction": "maximize"} if "metric_name" in fields else {}
    try:
        return Task(**made | chosen | fields)
    except TypeError as error:
        allowed = [each for each in Task.__dataclass_fields__ if each not in made and each != "source"]
        wrong = next((key for key in fields if key not in Task.__dataclass_fields__), "")
        raise TaskError(
            f"{name}: the third item names fields of autoprec.Task: {error}{did_you_mean(wrong, allowed)}"
        ) from None


def _split(returned: Any, kinds: tuple[type, type], name: str) -> tuple[Any, Any, dict[str, Any]]:
    items = returned if isinstance(returned, tuple) else (returned,)
    is_right = len(items) in (2, 3) and isinstance(items[0], kinds[0]) and isinstance(items[1], kinds[1])
    if not is_right or not isinstance(items[2] if len(items) == 3 else {}, Mapping):
        found = ", ".join(type(item).__name__ for item in items)
        raise TaskError(
            f"{name} returned {found}; a LightningModule and a LightningDataModule are needed, and optionally a dict of"
            " fields of autoprec.Task"
        )
    return items[0], items[1], dict(items[2]) if len(items) == 3 else {}


@dataclass(eq=False)
class _Loaders:
    """The loaders of a data module, opened anew for each trial."""

    data: Any

    def start(self) -> None:
        self.data.prepare_data()
        self.data.setup("fit")

    def train(self) -> Any:
        return _one(self.data.train_dataloader(), "train_dataloader")

    def held_out(self) -> Any:
        return _one(self.data.val_dataloader(), "val_dataloader")

    def steps_per_epoch(self, accumulation_steps: int) -> int | None:
        """Return how often an optimizer steps in an epoch; None for loaders without a length."""
        loader = self.train()
        return max(1, len(loader) // accumulation_steps) if hasattr(loader, "__len__") else None


def _one(loader: Any, name: str) -> Any:
    items = list(loader.values()) if isinstance(loader, Mapping) else loader
    if not isinstance(items, list | tuple):
        return loader
    is_loader = [not isinstance(item, torch.Tensor | list | tuple | Mapping) for item in items]
    if any(is_loader):
        if len(items) == 1:
            return items[0]
        raise TaskError(f"{name}() returned {len(items)} loaders; one is needed")
    return loader  # a plain list of batches


class _Logged:
    """Takes the place of `self.log` in a module that no Trainer runs; keeps the values of the last step."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def log(self, name: str, value: Any, *arguments: Any, **others: Any) -> None:
        self.values[name] = value

    def log_dict(self, dictionary: Mapping[str, Any], *arguments: Any, **others: Any) -> None:
        self.values.update(dictionary)


@dataclass(eq=False)
class _Parts:
    """The functions of the task; each works on the module that it is given."""

    function: Callable[[], Any]
    name: str
    kinds: tuple[type, type]
    metric_name: str | None
    steps_per_epoch: int | None = None
    has_scheduler: bool = False

    def check(self, module: Any) -> None:
        if not module.automatic_optimization:
            raise TaskError(
                f"{self.name}: {type(module).__name__} steps its optimizers itself (automatic_optimization is False);"
                " a function that returns an autoprec.Task, with `losses` for several optimizers, can say that"
            )

    def fresh(self, module: Any) -> _Parts:
        """Prepare a module as a Trainer would before it moves it to its device."""
        logged = _Logged()
        module.log, module.log_dict = logged.log, logged.log_dict
        module.prepare_data()
        module.setup("fit")
        module.configure_model()
        return self

    def model(self) -> nn.Module:
        module, _, _ = _split(call_own(self.function, {}, name=self.name), self.kinds, self.name)
        self.fresh(module)
        return module  # type: ignore[no-any-return]

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = _loss_of(_call_step(model, "training_step", batch))
        return loss

    def evaluate(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, Any]:
        """Return loss and metric of a held-out batch: what the validation step returns or logs."""
        module: Any = unwrap(model)
        logged = module.log.__self__.values
        logged.clear()
        has_step = type(module).validation_step is not self.kinds[0].validation_step  # type: ignore[attr-defined]
        returned = _call_step(module, "validation_step", batch) if has_step else None
        values = {key: value for key, value in logged.items() if _is_number(value)}
        loss = _loss_of(returned) if returned is not None else _logged_loss(values)
        if loss is None:
            loss = self.loss(module, batch)
        if self.metric_name is None:
            return loss, loss
        if self.metric_name not in values:
            known = ", ".join(values) or "nothing"
            raise TaskError(
                f"{self.name}: metric_name is {self.metric_name!r}, and validation_step logged {known}"
                f"{did_you_mean(self.metric_name, values)}"
            )
        return loss, values[self.metric_name]

    def build_optimizers(self, model: nn.Module) -> Any:
        """Return the module's own optimizer, and note its schedule."""
        module: Any = unwrap(model)
        optimizer, schedule = _configured(module.configure_optimizers(), self.name)
        if schedule is not None:
            self.has_scheduler = True
            # on the optimizer itself, which it refers to: a table here would keep both alive
            setattr(optimizer, _SCHEDULE, _stepping(schedule, self.steps_per_epoch, self.name))
        return optimizer

    def scheduler(self, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
        return getattr(optimizer, _SCHEDULE)


def _call_step(model: nn.Module, step: str, batch: Batch) -> Any:
    """Call the module's step; through the wrapper where there is one (DDP), whose forward does more."""
    module: Any = unwrap(model)
    method = getattr(module, step)
    call = functools.partial(method, batch, *_index_of(method))
    if module is model or isinstance(model, torch._dynamo.OptimizedModule):
        return call()
    had_forward = "forward" in module.__dict__
    forward = module.forward

    def redirected(*arguments: Any) -> Any:
        if had_forward:
            module.forward = forward
        else:
            del module.forward
        return call()

    module.forward = redirected
    return model(batch)


def _index_of(method: Callable[..., Any]) -> tuple[int, ...]:
    """Return the index that a step takes after its batch, whatever it calls it: Lightning gives it by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(method).parameters.values()
    is_open = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
    return (0,) if is_open or sum(parameter.kind in kinds for parameter in parameters) > 1 else ()


def _loss_of(returned: Any) -> Any:
    return returned["loss"] if isinstance(returned, Mapping) else returned


def _logged_loss(values: Mapping[str, Any]) -> Any:
    return next((value for key, value in values.items() if "loss" in key.lower()), None)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Number) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _configured(returned: Any, name: str) -> tuple[torch.optim.Optimizer, Any]:
    """Return optimizer and schedule of what `configure_optimizers` returned, in any of Lightning's forms for one."""
    schedules: Any = []
    if isinstance(returned, list | tuple) and len(returned) == 2 and isinstance(returned[0], list | tuple):
        returned, schedules = returned
    if isinstance(returned, list | tuple) and len(returned) == 1:
        returned = returned[0]
    if isinstance(returned, Mapping):
        schedules = returned.get("lr_scheduler", [])
        returned = returned["optimizer"]
    if not isinstance(returned, torch.optim.Optimizer):
        raise TaskError(
            f"{name}: configure_optimizers() returned {type(returned).__name__}; one optimizer is needed, with or"
            " without a schedule"
        )
    schedules = schedules if isinstance(schedules, list | tuple) else [schedules]
    if len(schedules) > 1:
        raise TaskError(f"{name}: configure_optimizers() returned {len(schedules)} schedules; at most one is needed")
    return returned, schedules[0] if schedules else None


class _EveryEpoch:
    """Steps a schedule that counts in epochs once in as many steps as an epoch has."""

    def __init__(self, schedule: Any, interval: int, optimizer: torch.optim.Optimizer) -> None:
        self.schedule, self.interval, self.optimizer = schedule, interval, optimizer
        self.num_steps = 0

    def step(self) -> None:
        self.num_steps += 1
        if self.num_steps % self.interval == 0:
            self.schedule.step()


def _stepping(schedule: Any, steps_per_epoch: int | None, name: str) -> Any:
    settings = dict(schedule) if isinstance(schedule, Mapping) else {"scheduler": schedule}
    made, interval, frequency = settings["scheduler"], settings.get("interval", "epoch"), settings.get("frequency", 1)
    if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TaskError(f"{name}: ReduceLROnPlateau waits for a metric, which a short trial has not; leave it out")
    if interval == "step":
        return made if frequency == 1 else _EveryEpoch(made, frequency, made.optimizer)
    if steps_per_epoch is None:
        raise TaskError(f"{name}: the schedule counts in epochs, and the loader has no length; use interval 'step'")
    return _EveryEpoch(made, frequency * steps_per_epoch, made.optimizer)

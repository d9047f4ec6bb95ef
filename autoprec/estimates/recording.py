"""Record one training step at its steady state, under fake tensors or for real: storages and operators."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoprec.apply import applied_policy, apply_policy, build_optimizer, remove_policy
from autoprec.emulation import emulate
from autoprec.errors import PrecisionWarning, TaskError, UsageError
from autoprec.estimates.batches import map_tensors, num_samples_of, resize_batch, tensors_of
from autoprec.estimates.fakes import cuda_attention, fake_batch, fake_copy, fake_mode, untouched_randomness
from autoprec.estimates.operations import Operation
from autoprec.estimates.tracker import PhaseMark, StorageRecord, StorageTracker
from autoprec.policy import Policy

__all__ = ["Loss", "StepSettings", "StepRecording", "record_step"]

Loss = Callable[[nn.Module, Any], torch.Tensor]
"""`loss(model, batch)` -> scalar tensor; calls the model that it is given."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What one training step does, apart from model, batch and loss.

    Attributes:
        policy: installed on the copy; None leaves the model as it is, its own policy included.
        optimizer: a class, or a function from parameters to an optimizer.
        optimizer_settings: keyword arguments of a class.
        accumulation_steps: micro-batches to one optimizer step; the batch is one micro-batch.
        set_to_none: as in `optimizer.zero_grad`.
        foreach: run the optimizer as CUDA does by default, on lists of tensors; False leaves the optimizer's own way.
        as_on_cuda: charge dropout as CUDA's fused kernels do, not as the CPU's.
        batch_size: rescale the batch; None keeps its size.
        image_size: rescale images (floating, four dimensions) to this height and width; None keeps them.
    """

    policy: Policy | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    optimizer_settings: Mapping[str, Any] | None = None
    accumulation_steps: int = 1
    set_to_none: bool = True
    foreach: bool = True
    as_on_cuda: bool = True
    batch_size: int | None = None
    image_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("accumulation_steps", "batch_size", "image_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UsageError(f"{name}: found {value!r}; allowed: whole numbers from 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecording:
    """One step as it ran: every storage that lived in it, and every operator that ran a kernel.

    Attributes:
        records: the storages, those that were there before the step included.
        operations: the operators of the step.
        phases: when each phase began.
        start: the tracker's clock at the start of the step.
        num_samples: samples of one optimizer step.
        fake: True under fake tensors, False for a real step.
    """

    records: tuple[StorageRecord, ...]
    operations: tuple[Operation, ...]
    phases: tuple[PhaseMark, ...]
    start: int
    num_samples: int
    fake: bool


def record_step(
    model: nn.Module, batch: Any, loss: Loss, *, settings: StepSettings | None = None, fake: bool = True
) -> StepRecording:
    """Record the second of two training steps on a copy of `model`, when the optimizer's state is there.

    The model, its gradients and all random states are left as they are. The copy is put in training mode where the
    model as a whole is not. A grad scaler is left out: it adds a few scalars and one pass over the gradients.

    Args:
        model: the bare model; it may carry a policy of its own.
        batch: one micro-batch, or a function without arguments that makes it.
        loss: the task's own loss.
        settings: what the step does.
        fake: False runs the step for real, on the model's own device.

    Raises:
        TaskError: no parameter is trained by the loss, or the model cannot be copied.
    """
    settings = settings or StepSettings()
    with ExitStack() as stack:
        stack.enter_context(untouched_randomness())
        stack.enter_context(emulate(gpu_rules=True, arithmetic=not fake))
        if fake:
            mode = fake_mode()
            copied, made = fake_copy(_bare(model), mode), fake_batch(batch, mode)
            stack.enter_context(mode)
            if settings.as_on_cuda:
                stack.enter_context(cuda_attention())
        else:
            copied = copy.deepcopy(_bare(model))
            made = batch() if callable(batch) and not isinstance(batch, torch.Tensor) else batch
            made = map_tensors(made, torch.clone)
        with torch.no_grad():
            made = resize_batch(made, batch_size=settings.batch_size, image_size=settings.image_size)
        return _record(copied, made, loss, settings, fake=fake)


def _bare(model: nn.Module) -> nn.Module:
    """Return the module inside torch.compile, DataParallel and DistributedDataParallel: the step is an eager one."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(model, wrappers) or "_orig_mod" in model._modules:
        model = model.module if isinstance(model, wrappers) else model._orig_mod  # type: ignore[assignment]
    return model


def _record(model: nn.Module, batch: Any, loss: Loss, settings: StepSettings, *, fake: bool) -> StepRecording:
    if not model.training:
        model.train()
    if settings.policy is not None:
        _install(model, settings.policy)
    optimizer = _build_optimizer(model, settings)
    tracker = StorageTracker(cuda_dropout=settings.as_on_cuda)
    _watch_residents(tracker, model, batch)
    with tracker.following(model), tracker:
        _run_step(tracker, model, batch, loss, optimizer, settings)
        start = tracker.clock
        tracker.records_operators = True
        _run_step(tracker, model, batch, loss, optimizer, settings)
    return StepRecording(
        records=tuple(tracker.records),
        operations=tuple(tracker.operations),
        phases=tuple(tracker.phases),
        start=start,
        num_samples=num_samples_of(batch) * settings.accumulation_steps,
        fake=fake,
    )


def _install(model: nn.Module, policy: Policy) -> None:
    if applied_policy(model) is not None:
        remove_policy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        apply_policy(model, policy)


def _build_optimizer(model: nn.Module, settings: StepSettings) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise TaskError(f"{type(model).__name__}: no parameter requires a gradient; nothing would be trained")
    keywords = dict(settings.optimizer_settings or {})
    if settings.policy is not None and isinstance(settings.optimizer, type):
        optimizer = build_optimizer(settings.policy, settings.optimizer, trained, **keywords)
    else:
        optimizer = settings.optimizer(trained, **keywords)
    if settings.foreach:
        for group in optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
    return optimizer


def _watch_residents(tracker: StorageTracker, model: nn.Module, batch: Any) -> None:
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            tracker.watch(parameter, "parameters", name)
        for buffer in module.buffers(recurse=False):
            tracker.watch(buffer, "buffers", name)
    for tensor in tensors_of(batch):
        tracker.watch(tensor, "inputs", "")


def _run_step(
    tracker: StorageTracker,
    model: nn.Module,
    batch: Any,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    settings: StepSettings,
) -> None:
    """Run one step; of many micro-batches two are enough, the second stands for all that follow the first."""
    owners = {parameter: name for name, module in model.named_modules() for parameter in module.parameters(False)}
    for micro_batch in range(min(settings.accumulation_steps, 2)):
        repeats = 1 if micro_batch == 0 else settings.accumulation_steps - 1
        tracker.enter("forward", repeats=repeats)
        value = loss(model, batch)
        if settings.accumulation_steps > 1:
            value = value / settings.accumulation_steps
        tracker.enter("backward", repeats=repeats)
        value.backward()  # type: ignore[no-untyped-call]
        del value
        _label_gradients(tracker, owners)
    tracker.enter("optimizer")
    optimizer.step()
    _label_state(tracker, optimizer, owners)
    optimizer.zero_grad(set_to_none=settings.set_to_none)
    tracker.enter("before")


def _label_gradients(tracker: StorageTracker, owners: Mapping[nn.Parameter, str]) -> None:
    found = False
    for parameter, name in owners.items():
        if parameter.grad is not None:
            tracker.watch(parameter.grad, "gradients", name)
            found = True
    if not found:
        raise TaskError(
            "loss: no parameter of the model received a gradient; loss(model, batch) calls the model it gets"
        )


def _label_state(tracker: StorageTracker, optimizer: torch.optim.Optimizer, owners: Mapping[nn.Parameter, str]) -> None:
    for parameter, name in owners.items():
        for tensor in tensors_of(optimizer.state.get(parameter)):
            tracker.watch(tensor, "optimizer_state", name)

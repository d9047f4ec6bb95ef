"""Record one training step at its steady state, under fake tensors or for real: storages and operators."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoprec.apply import applied_policy, apply_policy, build_optimizer, remove_policy
from autoprec.emulation import emulate
from autoprec.errors import PrecisionWarning, TaskError
from autoprec.estimates.batches import resize_batch
from autoprec.estimates.fakes import (
    causal_masks,
    copy_closures,
    cuda_attention,
    fake_batch,
    fake_copy,
    fake_mode,
    quiet_fakes,
    show_recurrent_gates,
    untouched_randomness,
)
from autoprec.estimates.operations import Operation
from autoprec.estimates.settings import Loss, StepSettings
from autoprec.estimates.tracker import PhaseMark, StorageRecord, StorageTracker
from autoprec.policy import Policy
from autoprec.tasks.batches import count_samples, map_tensors, tensors_of
from autoprec.training import needs_closure

__all__ = ["StepRecording", "record_step"]


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
    """Record one training step on a copy of `model`, at the steady state: when the optimizer's state is there.

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
        stack.enter_context(emulate())
        if fake:
            mode = fake_mode()
            copied, made = fake_copy(_bare(model), mode), fake_batch(_made(batch), mode)
            stack.enter_context(quiet_fakes())
            stack.enter_context(mode)
            stack.enter_context(causal_masks())
            if settings.as_on_cuda:
                stack.enter_context(cuda_attention())
                show_recurrent_gates(copied)
        else:
            copied = _real_copy(_bare(model))
            made = map_tensors(torch.clone, _made(batch))
        with torch.no_grad():
            made = resize_batch(made, batch_size=settings.batch_size, image_size=settings.image_size)
        return _record(copied, made, loss, settings, fake=fake)


def _real_copy(model: nn.Module) -> nn.Module:
    """Deep-copy the model; under no_grad, since a scripted module's copy would not consist of leaves."""
    memo: dict[int, Any] = {}
    with torch.no_grad():
        copied = copy.deepcopy(model, memo)
    copy_closures(model, memo)
    for original, parameter in zip(model.parameters(), copied.parameters(), strict=True):
        parameter.requires_grad_(original.requires_grad)
    return copied


def _made(batch: Any) -> Any:
    """Call a function that makes the batch outside of the fake mode: what it caches must stay real."""
    return batch() if callable(batch) and not isinstance(batch, torch.Tensor) else batch


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
    optimizers = _build_optimizers(model, settings)
    tracker = StorageTracker(fake=fake, cuda_dropout=settings.as_on_cuda)
    owners = _watch_residents(tracker, model, batch)
    step = _Step(tracker, model, batch, loss, optimizers, settings, owners)
    is_simple = fake and settings.set_to_none and not settings.losses
    with tracker.following(model), tracker:
        start = step.run_to_steady_state() if is_simple else step.run_twice()
    return StepRecording(
        records=tuple(tracker.records),
        operations=tuple(tracker.operations),
        phases=tuple(tracker.phases),
        start=start,
        num_samples=(settings.num_samples or count_samples)(batch) * settings.accumulation_steps,
        fake=fake,
    )


def _install(model: nn.Module, policy: Policy) -> None:
    if applied_policy(model) is not None:
        remove_policy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        apply_policy(model, policy)


def _build_optimizers(model: nn.Module, settings: StepSettings) -> list[torch.optim.Optimizer]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise TaskError(f"{type(model).__name__}: no parameter requires a gradient; nothing would be trained")
    optimizers = list(settings.optimizers(model)) if settings.optimizers else [_one_optimizer(trained, settings)]
    for optimizer in optimizers:
        if needs_closure(optimizer):
            kind = type(optimizer).__name__
            raise TaskError(f"{kind}: an optimizer that calls a closure has no single step to estimate")
        for group in optimizer.param_groups if settings.foreach else ():
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
    return optimizers


def _one_optimizer(trained: list[nn.Parameter], settings: StepSettings) -> torch.optim.Optimizer:
    keywords = dict(settings.optimizer_settings or {})
    if settings.policy is not None and isinstance(settings.optimizer, type):
        return build_optimizer(settings.policy, settings.optimizer, trained, **keywords)
    return settings.optimizer(trained, **keywords)


def _watch_residents(tracker: StorageTracker, model: nn.Module, batch: Any) -> dict[nn.Parameter, str]:
    """Label what is there before any step; return the first module that owns each parameter."""
    owners: dict[nn.Parameter, str] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, name)
        for buffer in module.buffers(recurse=False):
            tracker.watch(buffer, "buffers", name)
    for parameter, name in owners.items():
        tracker.watch(parameter, "parameters", name)
    for tensor in tensors_of(batch):
        tracker.watch(tensor, "inputs", "")
    return owners


@dataclass(frozen=True, slots=True)
class _Step:
    """A training step that labels what it makes."""

    tracker: StorageTracker
    model: nn.Module
    batch: Any
    loss: Loss
    optimizers: Sequence[torch.optim.Optimizer]
    settings: StepSettings
    owners: Mapping[nn.Parameter, str]

    def run_to_steady_state(self) -> int:
        """Run one step as if it were the second; return the clock at its start.

        The optimizer steps twice, unrecorded at first: the state that this makes was there from the start.
        """
        start = self.tracker.clock
        self.tracker.records_operators = True
        self._run_micro_batches(self.loss)
        self.tracker.records_operators = False
        self.tracker.enter("warm_up")
        self._run_optimizers(self.optimizers)
        self.tracker.settle_warm_up(start)
        self.tracker.records_operators = True
        self._end(self.optimizers)
        return start

    def run_twice(self) -> int:
        """Run two steps; return the clock at the start of the second."""
        self._run_parts()
        start = self.tracker.clock
        self.tracker.records_operators = True
        self._run_parts()
        return start

    def _run_parts(self) -> None:
        """Run one step: as a whole, or where each optimizer has a loss of its own, one after the other."""
        whole: list[tuple[Loss, Sequence[torch.optim.Optimizer]]] = [(self.loss, self.optimizers)]
        own = [(loss, (each,)) for loss, each in zip(self.settings.losses, self.optimizers, strict=False)]
        for loss, optimizers in own or whole:
            self._run_micro_batches(loss)
            self._end(optimizers)

    def _run_micro_batches(self, loss: Loss) -> None:
        """Of many micro-batches two are enough: the second stands for all that follow the first."""
        num_steps = self.settings.accumulation_steps
        for micro_batch in range(min(num_steps, 2)):
            repeats = 1 if micro_batch == 0 else num_steps - 1
            self.tracker.enter("forward", repeats=repeats)
            value = loss(self.model, self.batch)
            if num_steps > 1:
                value = value / num_steps
            self.tracker.enter("backward", repeats=repeats)
            value.backward()  # type: ignore[no-untyped-call]
            del value
            self._label_gradients()

    def _end(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.tracker.enter("optimizer")
        self._run_optimizers(optimizers)
        for each in self.optimizers:
            each.zero_grad(set_to_none=self.settings.set_to_none)
        self.tracker.enter("before")

    def _run_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            optimizer.step()
        for parameter, name in self.owners.items():
            for tensor in tensors_of([each.state.get(parameter) for each in self.optimizers]):
                self.tracker.watch(tensor, "optimizer_state", name)

    def _label_gradients(self) -> None:
        found = False
        for parameter, name in self.owners.items():
            if parameter.grad is not None:
                self.tracker.watch(parameter.grad, "gradients", name)
                found = True
        if not found:
            raise TaskError("loss: no parameter of the model received a gradient; does it call the model it is given?")

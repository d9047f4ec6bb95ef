"""Watch a long training run: loss scale, skipped steps, gradients, buffers; name the unit at fault, move it to FP32.

guard = TrainingGuard(model, optimizer=optimizer, grad_scaler=scaler, log="guard.csv", patched_policy="guarded.json")
for batch in batches:
    ...                       # backward, scaler.step(optimizer), scaler.update()
    guard.after_step(loss)
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoprec.apply import applied_policy
from autoprec.errors import ApplyError, TaskError, UsageError
from autoprec.guard.buffers import BufferKeeper
from autoprec.guard.culprits import Culprit, Culprits
from autoprec.guard.norms import StepNorms
from autoprec.guard.records import GuardEvent, GuardRecord, Log, ScalarWriter, open_log
from autoprec.guard.repair import Mover, exchange_policy
from autoprec.policy import Policy
from autoprec.training import MAX_CONSECUTIVE_SKIPS, ScaleCollapsedError

__all__ = ["TrainingGuard"]

WATCHED_STEPS = 20
"""So many steps after the last trouble the hooks come off again."""
LOOK_AT_BUFFERS = 100
"""Every so many steps buffers are looked at without any trouble."""

logger = logging.getLogger(__name__)


class TrainingGuard:
    """Call `after_step` once an optimizer step, after `scaler.update()`; nothing else of the loop changes.

    In steps without trouble it costs the norm of the gradients and a copy of the buffers. After the first step with
    trouble (a skipped step that no growth of the scale explains, a loss or gradient that is not finite) hooks look at
    every unit, until `WATCHED_STEPS` steps went well. A unit whose forward pass was at fault `patience` times in the
    last `window` steps is moved to FP32, and the loss scale is what it was before: it was not at fault. One whose
    backward pass was is moved where the scale is down at its floor. In a process group all processes must have a
    guard, and all move the unit that the first of them names.

    Args:
        model: under a policy where units are to be moved; may be wrapped.
        optimizer: one or several whose gradient norm is to be noted; None leaves it to `after_step`.
        grad_scaler: None, or one that is off, where there is no loss scale.
        log: the path of a CSV file, a SummaryWriter, or an object with `write(GuardRecord)`.
        patched_policy: where the changed policy is written; no file is ever overwritten, `-2` is added to the name.
            None moves no unit.
        min_scale: the floor; a scale that falls below it is set to it. At 1 gradients are as large as FP32 has them.
        max_consecutive_skips: so many steps in a row with trouble end the training.
        restore_buffers: give buffers that are not finite after a bad step the values of the last good one.
        every: loss and gradient norm are read from the device each so many steps.

    Raises:
        UsageError: a number out of its range, a file that cannot be written, units to be moved without a policy.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        grad_scaler: torch.amp.GradScaler | None = None,
        log: str | os.PathLike[str] | Log | ScalarWriter | None = None,
        patched_policy: str | os.PathLike[str] | None = None,
        min_scale: float = 1.0,
        patience: int = 2,
        max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS,
        window: int = 100,
        restore_buffers: bool = True,
        every: int = 1,
    ) -> None:
        self.policy = applied_policy(model)
        self.grad_scaler = grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        self._scale = self.grad_scaler.get_scale() if self.grad_scaler is not None else None
        counts = {"patience": patience, "window": window, "every": every}
        _check(self._scale, min_scale=min_scale, max_consecutive_skips=max_consecutive_skips, **counts)
        self._mover = None if patched_policy is None else Mover(model, patched_policy)
        self.model = model
        self.min_scale = min_scale
        self.patience = patience
        self.max_consecutive_skips = max_consecutive_skips
        self.restore_buffers = restore_buffers
        self.every = every
        self.step = 0
        self.events: list[GuardEvent] = []
        self._log = open_log(log) if log is not None and _is_first_process() else None
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self._norms = StepNorms(optimizers, enabled=every == 1)
        self._buffers = BufferKeeper(model)
        self._culprits = Culprits(model, window=window)
        self._skips: deque[bool] = deque(maxlen=window)
        self._non_finite: deque[bool] = deque(maxlen=window)
        self._told: set[str] = set()
        self._last_trouble = self._num_in_a_row = 0
        self._good_scale = self._scale
        self._has_grown = True

    def __enter__(self) -> TrainingGuard:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Take all hooks off and close the CSV file; the model keeps the policy that it has now."""
        self._culprits.stop()
        self._norms.close()
        if self._log is not None:
            self._log.close()
            self._log = None

    def after_step(
        self, loss: torch.Tensor | float | None = None, *, grad_norm: torch.Tensor | float | None = None
    ) -> GuardRecord:
        """Take note of one optimizer step, and do what is needed.

        Args:
            loss: the loss of the step, or its mean over micro-batches; without it an overflow is named a step later.
            grad_norm: the norm before clipping where the loop has it; else that of what the optimizer was given.

        Raises:
            ScaleCollapsedError: `max_consecutive_skips` steps in a row were skipped.
            TaskError: so many in a row had a loss or gradient that is not finite, without a scaler.
        """
        self.step += 1
        num_events = len(self.events)
        scale, skipped = self._read_scale()
        value, norm = self._read(loss, grad_norm)
        bad_gradient = norm is not None and not math.isfinite(norm)
        is_bad = bad_gradient or (value is not None and not math.isfinite(value))
        trouble = skipped or is_bad
        self._skips.append(skipped)
        self._non_finite.append(is_bad)
        culprit = self._culprits.take(self.policy, step=self.step, trouble=trouble, in_group=skipped or bad_gradient)
        num_buffers = self._look_at_buffers(trouble=trouble)
        if culprit is not None:
            self._name(culprit)
        self._keep_scale_up(skipped=skipped)
        self._watch_or_not(skipped=skipped, is_bad=is_bad)
        record = GuardRecord(
            step=self.step,
            loss=value,
            loss_scale=scale,
            skipped=skipped,
            skip_rate=sum(self._skips) / len(self._skips),
            grad_norm=None if skipped else norm,
            nan_rate=sum(self._non_finite) / len(self._non_finite),
            non_finite_buffers=num_buffers,
            first_bad_unit="" if culprit is None else culprit.name or "the model itself",
            events="; ".join(event.message for event in self.events[num_events:]),
        )
        if self._log is not None:
            self._log.write(record)
        self._end_where_hopeless(skipped=skipped, trouble=trouble)
        return record

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: the step, the rates, and the policy, with the units that were moved."""
        policy = self.policy.to_json() if self.policy is not None else None
        return {"step": self.step, "skips": [*self._skips], "non_finite": [*self._non_finite], "policy": policy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; the model gets the policy that it had then. Load the grad scaler's state before.

        Raises:
            ApplyError: that policy does not fit the model.
        """
        if state["policy"] is not None and (self.policy is None or state["policy"] != self.policy.to_json()):
            self.policy = exchange_policy(self.model, Policy.from_json(state["policy"], where="the guard's state"))
            if self._mover is not None:
                self._mover.policy = self.policy
        self.step = self._last_trouble = int(state["step"])
        self._skips.extend(state["skips"])
        self._non_finite.extend(state["non_finite"])
        if self.grad_scaler is not None:
            self._scale = self._good_scale = self.grad_scaler.get_scale()
        self._buffers.keep()

    def _read_scale(self) -> tuple[float | None, bool]:
        """Return the scale of the step's backward pass, and whether the step was skipped: only that lowers a scale."""
        if self.grad_scaler is None or self._scale is None:
            return None, False
        before, self._scale = self._scale, self.grad_scaler.get_scale()
        self._has_grown = self._has_grown or self._scale > before
        return before, self._scale < before

    def _read(
        self, loss: torch.Tensor | float | None, grad_norm: torch.Tensor | float | None
    ) -> tuple[float | None, float | None]:
        norm = self._norms.take()
        if self.step % self.every:
            loss = grad_norm = None
        self._norms.enabled = (self.step + 1) % self.every == 0
        value = float(loss.detach()) if isinstance(loss, torch.Tensor) else loss
        return value, norm if grad_norm is None else float(grad_norm)

    def _look_at_buffers(self, *, trouble: bool) -> int | None:
        if not trouble and self.step % LOOK_AT_BUFFERS:
            self._buffers.keep()
            return None
        bad = self._buffers.non_finite()
        written = self._buffers.put_back(bad) if bad and self.restore_buffers else []
        if written and not self._num_in_a_row:
            self._tell("buffers", "", f"buffers were not finite and have their last good values: {_listed(written)}")
        elif bad and not written:
            self._tell("buffers", "", f"buffers are not finite: {_listed(bad)}")
        if not (trouble or bad):
            self._buffers.keep()
        return len(bad)

    def _name(self, culprit: Culprit) -> None:
        phase = culprit.seen.phase
        if f"{phase} {culprit.name}" not in self._told:
            self._told.add(f"{phase} {culprit.name}")
            self._tell("named", culprit.name, f"values stop being finite in {culprit}")
        is_at_floor = self._scale is not None and self._scale <= self.min_scale
        keeps_failing = self._culprits.count(culprit) >= self.patience
        if culprit.can_move and keeps_failing and (phase == "forward" or self._scale is None or is_at_floor):
            self._move(culprit)

    def _move(self, culprit: Culprit) -> None:
        if self._mover is None:
            return
        num_times = self._culprits.count(culprit)
        reason = f"not finite ({culprit.seen.phase}) in {num_times} steps up to step {self.step} of a training run"
        self._culprits.forget()
        try:
            place = self._mover.move(culprit.name, reason=reason, writes=_is_first_process())
        except ApplyError as error:
            self._tell("kept", culprit.name, f"{culprit.name} could not be moved to FP32: {error}")
            return
        self.policy = self._mover.policy
        self._tell("moved", culprit.name, f"{culprit.name} computes in FP32 from here on: {reason}; {place}")
        if self.grad_scaler is not None and culprit.seen.phase == "forward" and self._good_scale is not None:
            self.grad_scaler.update(self._good_scale)
            self._scale = self._good_scale

    def _keep_scale_up(self, *, skipped: bool) -> None:
        if self.grad_scaler is not None and self._scale is not None and skipped and self._scale < self.min_scale:
            self.grad_scaler.update(float(self.min_scale))
            self._scale = self.grad_scaler.get_scale()
            if "floor" not in self._told:
                self._told.add("floor")
                self._tell("floor", "", f"the loss scale is kept at its floor of {self.min_scale:g}")

    def _watch_or_not(self, *, skipped: bool, is_bad: bool) -> None:
        if skipped or is_bad:
            self._last_trouble = self.step
            self._num_in_a_row += 1
            if is_bad or not self._has_grown:
                self._culprits.start()
            self._has_grown = False
            return
        self._num_in_a_row = 0
        self._good_scale = self._scale
        if self.step - self._last_trouble >= WATCHED_STEPS:
            self._culprits.stop()

    def _end_where_hopeless(self, *, skipped: bool, trouble: bool) -> None:
        if not trouble or self._num_in_a_row < self.max_consecutive_skips:
            return
        if skipped and self._scale is not None:
            raise ScaleCollapsedError(step=self.step, scale=self._scale, num_skipped=self._num_in_a_row)
        raise TaskError(
            f"the loss or the gradient was not finite in {self._num_in_a_row} steps in a row, up to step {self.step}; "
            "go on from a checkpoint before that"
        )

    def _tell(self, kind: str, unit: str, message: str) -> None:
        self.events.append(GuardEvent(self.step, kind, unit, message))
        logger.warning("guard, step %d: %s", self.step, message)


def _check(scale: float | None, *, min_scale: float, max_consecutive_skips: int, **counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise UsageError(f"{name} is {value}; at least 1")
    if max_consecutive_skips <= counts["patience"]:
        raise UsageError(f"max_consecutive_skips is {max_consecutive_skips}; above patience, {counts['patience']}")
    if not 0 < min_scale < math.inf:
        raise UsageError(f"min_scale is {min_scale}; a number above 0")
    if scale is not None and scale < min_scale:
        raise UsageError(f"the loss scale is {scale:g}, below its floor min_scale={min_scale:g}")


def _is_first_process() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _listed(names: Sequence[str], *, count: int = 8) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")

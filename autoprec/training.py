"""One training step done right: accumulate, unscale once, clip, step, update once, schedule; and the scale's guard.

step = TrainingStep(optimizer, grad_scaler=scaler, accumulation_steps=4, max_grad_norm=1.0, schedulers=[scheduler])
for batch in batches:
    step(loss(model, batch))
step.finish()
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoprec.errors import ApplyError, AutoprecError, TaskError

__all__ = [
    "TrainingStep",
    "StepResult",
    "ScaleGuard",
    "ScaleCollapsedError",
    "low_precision_parameters",
    "list_dtypes",
    "needs_closure",
]

MIN_SCALE = 2.0**-14
"""Below this a loss scale no longer helps: it would shrink gradients under FP16's smallest normal value."""
MAX_CONSECUTIVE_SKIPS = 40
"""More than the 30 halvings that lead from torch's 65536 to `MIN_SCALE`."""
MAX_STEPS_WITHOUT_GRADIENT = 10


class ScaleCollapsedError(AutoprecError):
    """The loss scale fell without end: every gradient overflows, nothing is learned."""

    def __init__(self, *, step: int, scale: float, num_skipped: int) -> None:
        super().__init__(
            f"loss scale collapsed at step {step}: {num_skipped} steps in a row were skipped for non-finite gradients"
            f" and the scale is {scale:g}"
        )
        self.step = step
        self.scale = scale
        self.num_skipped = num_skipped

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild_collapse, (self.step, self.scale, self.num_skipped))


def _rebuild_collapse(step: int, scale: float, num_skipped: int) -> ScaleCollapsedError:
    return ScaleCollapsedError(step=step, scale=scale, num_skipped=num_skipped)


class ScaleGuard:
    """Ends a training whose loss scale runs to zero, before a scale of 0 writes NaN into the weights.

    Args:
        min_scale: a scale below this is a collapse; also where the scale started below it and steps are skipped.
        max_consecutive_skips: so many skipped steps in a row are a collapse.
    """

    def __init__(self, *, min_scale: float = MIN_SCALE, max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS) -> None:
        if not min_scale > 0 or max_consecutive_skips < 1:
            raise ValueError(
                f"min_scale is {min_scale} and max_consecutive_skips {max_consecutive_skips}; allowed: above 0, from 1"
            )
        self.min_scale = min_scale
        self.max_consecutive_skips = max_consecutive_skips
        self.num_consecutive_skips = 0

    def check(self, *, step: int, scale: float, skipped: bool) -> None:
        """Take note of one step; `scale` is the scale after `GradScaler.update`.

        Raises:
            ScaleCollapsedError: the scale is below the floor, or too many steps in a row were skipped.
        """
        self.num_consecutive_skips = self.num_consecutive_skips + 1 if skipped else 0
        collapsed = scale < self.min_scale or self.num_consecutive_skips >= self.max_consecutive_skips
        if skipped and collapsed:
            raise ScaleCollapsedError(step=step, scale=scale, num_skipped=self.num_consecutive_skips)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        step: counts from 1, skipped steps included.
        taken: for each optimizer, whether it changed its parameters.
        without_gradient: for each optimizer, whether none of its parameters had a gradient.
        grad_norm: the norm of the unscaled gradients before clipping; None where it is not finite or not asked for.
        scale: the loss scale of this step's backward; None without a scaler.
        num_batches: the micro-batches that went into it.
    """

    step: int
    taken: tuple[bool, ...]
    without_gradient: tuple[bool, ...]
    grad_norm: float | None
    scale: float | None
    num_batches: int

    @property
    def was_taken(self) -> bool:
        """True where at least one optimizer stepped and none was skipped for non-finite gradients."""
        return any(self.taken) and not self.was_skipped

    @property
    def was_skipped(self) -> bool:
        """True where an optimizer that had gradients did not step."""
        return _any_skipped(self.taken, self.without_gradient)


class TrainingStep:
    """Runs backward for each micro-batch and one optimizer step for each window of them.

    Args:
        optimizers: one optimizer, or several that share the scaler: of one loss, or each with a loss of its own.
        grad_scaler: an enabled or disabled `GradScaler`; None is the same as a disabled one.
        accumulation_steps: micro-batches to one step; the gradient is their mean. `finish` closes a shorter window.
        max_grad_norm: clips the norm of each optimizer's unscaled gradients.
        schedulers: each is stepped when its own optimizer really took its step.
        model: gives parameters their names in messages; never changed.
        guard: ends a collapsing scale; None takes the default limits.
        report_norm: False leaves `grad_norm` None and saves reading it from the device.
        on_skip: called with the step's number when gradients are not finite, while they still stand in `.grad`.

    Raises:
        ApplyError: trainable parameters in less than FP32 (they are listed), or a closure optimizer with a live scaler.
    """

    def __init__(
        self,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
        accumulation_steps: int = 1,
        max_grad_norm: float | None = None,
        schedulers: Sequence[Any] = (),
        model: nn.Module | None = None,
        guard: ScaleGuard | None = None,
        report_norm: bool = True,
        on_skip: Callable[[int], None] | None = None,
    ) -> None:
        self.optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        self.grad_scaler = grad_scaler if grad_scaler is not None else torch.amp.GradScaler(enabled=False)
        self.accumulation_steps = accumulation_steps
        self.max_grad_norm = max_grad_norm
        self.schedulers = list(schedulers)
        self.guard = guard if guard is not None else ScaleGuard()
        self.report_norm = report_norm
        self.on_skip = on_skip
        self._check(model)
        self.num_steps = 0
        self.num_steps_taken = 0
        self.num_steps_skipped = 0
        self.num_steps_without_gradient = [0] * len(self.optimizers)
        self.had_gradient = False
        self._num_batches = 0
        self._turn: int | None = None
        self._parts: list[_Part] = []

    def _check(self, model: nn.Module | None) -> None:
        if not self.optimizers:
            raise ValueError("no optimizer was given")
        if self.accumulation_steps < 1:
            raise ValueError(f"accumulation_steps is {self.accumulation_steps}; at least 1")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {self.max_grad_norm}; above 0, or None for no clipping")
        low = low_precision_parameters(model, optimizers=self.optimizers)
        if low:
            raise ApplyError(
                f"trainable parameters must be FP32 masters, found {list_dtypes(low)}; load the model in FP32, or lift"
                " them with apply_policy(..., lift_half_parameters=True) before the optimizer is built"
            )
        closures = [type(optimizer).__name__ for optimizer in self.optimizers if needs_closure(optimizer)]
        if closures and self.grad_scaler.is_enabled():
            raise ApplyError(
                f"{closures[0]} evaluates the loss in a closure, which a grad scaler does not support;"
                " use a policy without FP16 or another optimizer"
            )
        if closures and (self.accumulation_steps > 1 or len(self.optimizers) > 1):
            raise ApplyError(f"{closures[0]} needs a closure: accumulation_steps must be 1, with no other optimizer")

    def __call__(self, loss: torch.Tensor, *, optimizer: int | None = None) -> StepResult | None:
        """Run backward for one micro-batch, and the optimizer step when the window is full.

        Args:
            loss: the mean loss of the micro-batch, a scalar.
            optimizer: the place of the one optimizer that this loss trains, where each has a loss of its own (a GAN).
                The whole window of the first optimizer comes first; it steps, and the losses of the next see what it
                changed. What a loss leaves in the gradients of the others is dropped. The scaler is updated once,
                after the last optimizer.

        Returns:
            The step's result, or None while the window is open or another optimizer's turn is still to come.

        Raises:
            TaskError: the loss has no gradient, or no parameter gets one.
            ScaleCollapsedError: the loss scale runs to zero.
            ValueError: the loss of another optimizer than the one whose turn it is.
        """
        self._take_turn(optimizer)
        _check_loss(loss)
        if any(needs_closure(optimizer) for optimizer in self.optimizers):
            raise ApplyError("this optimizer needs a closure: call step.run_closure(compute_loss)")
        if self.accumulation_steps > 1:
            loss = loss / self.accumulation_steps
        self.grad_scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._num_batches += 1
        return self._step() if self._num_batches == self.accumulation_steps else None

    def finish(self) -> StepResult | None:
        """Close a window that is not full, with the mean over the micro-batches it has; None where none is open.

        Where each optimizer has a loss of its own, the window of the one whose turn it is.
        """
        if self._num_batches == 0:
            return None
        missing = self.accumulation_steps / self._num_batches
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(missing)
        return self._step()

    def run_closure(self, compute_loss: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, StepResult]:
        """Take one step of a closure optimizer (LBFGS); `compute_loss` may be called several times.

        Returns:
            The first loss and the step's result; its norm is that of the last evaluation.
        """
        optimizer = self.optimizers[0]
        losses: list[torch.Tensor] = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = compute_loss()
            _check_loss(loss)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            return losses[-1]

        optimizer.step(closure)  # type: ignore[arg-type]
        norm = self._norm([p.grad for p in self._parameters() if p.grad is not None])
        norm = norm if norm is not None and math.isfinite(norm) else None
        self.num_steps += 1
        self.num_steps_taken += 1
        self._schedule((True,))
        optimizer.zero_grad()
        return losses[0], StepResult(self.num_steps, (True,), (False,), norm, None, 1)

    def _take_turn(self, optimizer: int | None) -> None:
        expected = len(self._parts) if self._parts or optimizer is not None else None
        if self._num_batches:
            expected = self._turn
        if optimizer != expected or (optimizer or 0) >= len(self.optimizers):
            raise ValueError(
                f"a loss of optimizer {optimizer} came where that of optimizer {expected} was to come (None: of all);"
                f" there are {len(self.optimizers)}"
            )
        self._turn = optimizer

    def _step(self) -> StepResult | None:
        """Step the optimizers whose window is full; the step as a whole ends with the last of them."""
        optimizers = self.optimizers if self._turn is None else [self.optimizers[self._turn]]
        if not self._parts:
            self.num_steps += 1
        num_batches, self._num_batches = self._num_batches, 0
        part = self._apply(optimizers)
        self._parts.append(part)
        if part.was_skipped and self.on_skip is not None:
            self.on_skip(self.num_steps)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return self._end(num_batches) if sum(len(p.taken) for p in self._parts) == len(self.optimizers) else None

    def _end(self, num_batches: int) -> StepResult:
        parts, self._parts = self._parts, []
        taken = tuple(each for part in parts for each in part.taken)
        bare = tuple(each for part in parts for each in part.without_gradient)
        scale = self.grad_scaler.get_scale() if self.grad_scaler.is_enabled() else None
        norm = math.hypot(*(part.grad_norm for part in parts if part.grad_norm is not None))
        has_norm = self.report_norm and not all(bare) and math.isfinite(norm)
        result = StepResult(self.num_steps, taken, bare, norm if has_norm else None, scale, num_batches)
        self._count_without_gradient(bare)
        self.num_steps_taken += result.was_taken
        self.num_steps_skipped += result.was_skipped
        self._schedule(taken)
        if scale is not None and not all(bare):
            self.grad_scaler.update()
            self.guard.check(step=self.num_steps, scale=self.grad_scaler.get_scale(), skipped=result.was_skipped)
        return result

    def _apply(self, optimizers: Sequence[torch.optim.Optimizer]) -> _Part:
        """Unscale, clip and step each optimizer that has gradients; tell the whole norm and who really stepped."""
        bare = tuple(all(p.grad is None for p in _parameters_of(optimizer)) for optimizer in optimizers)
        ready = [optimizer for optimizer, none in zip(optimizers, bare, strict=True) if not none]
        gradients: list[torch.Tensor] = []
        for optimizer in ready:
            if self.grad_scaler.is_enabled():
                self.grad_scaler.unscale_(optimizer)
            gradients += [p.grad for p in _parameters_of(optimizer) if p.grad is not None]
        norm = self._norm(gradients)
        stepped: set[int] = set()
        for optimizer in ready:
            if self.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(_parameters_of(optimizer), self.max_grad_norm)
            handle = optimizer.register_step_post_hook(_StepNote(stepped))
            try:
                self.grad_scaler.step(optimizer)
            finally:
                handle.remove()
        return _Part(tuple(id(optimizer) in stepped for optimizer in optimizers), bare, norm)

    def _norm(self, gradients: list[torch.Tensor]) -> float | None:
        """Return the norm, which may be infinite or NaN; None where it is not asked for or there is none."""
        if not self.report_norm or not gradients:
            return None
        return float(nn.utils.get_total_norm([g.coalesce().values() if g.is_sparse else g for g in gradients]))

    def _schedule(self, taken: tuple[bool, ...]) -> None:
        by_optimizer = dict(zip(map(id, self.optimizers), taken, strict=True))
        for scheduler in self.schedulers:
            if by_optimizer.get(id(getattr(scheduler, "optimizer", None)), any(taken)):
                scheduler.step()

    def _count_without_gradient(self, bare: tuple[bool, ...]) -> None:
        for index, none in enumerate(bare):
            self.num_steps_without_gradient[index] += none
        self.had_gradient = self.had_gradient or not all(bare)
        if not self.had_gradient and self.num_steps >= MAX_STEPS_WITHOUT_GRADIENT:
            raise TaskError(
                f"no parameter of the optimizer got a gradient in {self.num_steps} steps: the loss depends on none of"
                " them (another model's parameters in the optimizer, or all of them frozen)"
            )

    def _parameters(self) -> Iterator[nn.Parameter]:
        seen: set[int] = set()
        for optimizer in self.optimizers:
            for parameter in _parameters_of(optimizer):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter


@dataclass(frozen=True, slots=True)
class _Part:
    """What one call of `_apply` did; a norm may be non-finite here."""

    taken: tuple[bool, ...]
    without_gradient: tuple[bool, ...]
    grad_norm: float | None

    @property
    def was_skipped(self) -> bool:
        return _any_skipped(self.taken, self.without_gradient)


def _any_skipped(taken: tuple[bool, ...], without_gradient: tuple[bool, ...]) -> bool:
    return any(not stepped and not bare for stepped, bare in zip(taken, without_gradient, strict=True))


class _StepNote:
    """A step hook that notes which optimizers changed their parameters; a fused kernel skips inside its own step."""

    def __init__(self, stepped: set[int]) -> None:
        self.stepped = stepped

    def __call__(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None or float(found_inf) == 0.0:
            self.stepped.add(id(optimizer))


def needs_closure(optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer]) -> bool:
    """Tell whether `optimizer.step` cannot be called without a closure (LBFGS)."""
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    parameter = inspect.signature(kind.step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def low_precision_parameters(
    model: nn.Module | None = None, *, optimizers: Sequence[torch.optim.Optimizer] = ()
) -> dict[str, torch.dtype]:
    """List the trainable floating parameters narrower than FP32; frozen ones may stay as they are.

    Names are the model's; a parameter of an optimizer that no model names is called by its group and place.
    """
    names = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
    found = {id(p): (names[id(p)], p) for p in (model.parameters() if model is not None else ())}
    for number, optimizer in enumerate(optimizers):
        for group_number, group in enumerate(optimizer.param_groups):
            for place, p in enumerate(group["params"]):
                name = f"optimizer {number}, group {group_number}, parameter {place} {tuple(p.shape)}"
                found.setdefault(id(p), (name, p))
    return {name: p.dtype for name, p in found.values() if p.requires_grad and p.is_floating_point() and p.itemsize < 4}


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_loss(loss: torch.Tensor) -> None:
    if not isinstance(loss, torch.Tensor):
        raise TaskError(f"the loss is {type(loss).__name__}; a scalar tensor is needed")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise TaskError(f"the loss has shape {tuple(loss.shape)} and dtype {loss.dtype}; a floating scalar is needed")
    if not loss.requires_grad:
        raise TaskError(
            "the loss has no gradient: every parameter it depends on is frozen, or it was detached or computed"
            " under no_grad"
        )


def list_dtypes(found: dict[str, torch.dtype], *, count: int = 8) -> str:
    """Return the first names with their dtypes, and how many more there are."""
    shown = [f"{name} ({str(dtype).removeprefix('torch.')})" for name, dtype in list(found.items())[:count]]
    return ", ".join(shown) + (f" and {len(found) - count} more" if len(found) > count else "")

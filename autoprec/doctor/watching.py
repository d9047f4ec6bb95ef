"""Watch a training loop that somebody else wrote: its modules, operators, grad scaler, clipping and optimizers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoprec.apply import read_structure
from autoprec.doctor.observations import Flushed, Observations, Updates
from autoprec.doctor.operators import HALF, OperatorWatch
from autoprec.errors import ApplyError
from autoprec.estimates import Gpu, gpu_by_name
from autoprec.tasks.batches import tensors_of

__all__ = ["watch"]

CLIPPING = ("_clip_grads_with_norm_", "clip_grads_with_norm_", "clip_grad_norm_", "clip_grad_value_")
"""Functions of torch.nn.utils.clip_grad that change gradients; the first is what `clip_grad_norm_` calls, however it
was imported."""


@contextmanager
def watch(
    model: nn.Module | None = None,
    *,
    gpu: str | Gpu = "a100-80",
    on_step: Callable[[Observations], None] | None = None,
) -> Iterator[Observations]:
    """Watch everything that trains inside the block; yield what was seen, which grows as it goes.

    Any loop, with or without a grad scaler, accumulation or a policy. Nothing is changed but the time it takes: every
    operator is looked at. Without a GPU enter it inside `autoprec.emulate()`. Process-wide: one at a time.

    Args:
        model: gives modules and parameters their names; None takes whatever module is called first from outside.
        gpu: whose speed the predicted cost of casts is for.
        on_step: called after each optimizer step that was tried, with what was seen so far.
    """
    seen = Observations()
    watcher = _Watcher(seen, model, gpu if isinstance(gpu, Gpu) else gpu_by_name(gpu), on_step)
    with ExitStack() as stack:
        stack.enter_context(watcher.patched())
        stack.callback(register_module_forward_pre_hook(watcher.before_module).remove)
        stack.callback(register_module_forward_hook(watcher.after_module, always_call=True).remove)
        stack.callback(register_optimizer_step_pre_hook(watcher.before_optimizer).remove)
        stack.callback(register_optimizer_step_post_hook(watcher.after_optimizer).remove)
        stack.enter_context(saved_tensors_hooks(watcher.pack, _unpack))
        stack.enter_context(watcher.operators)
        yield seen


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Watcher:
    """The hooks of one `watch`."""

    def __init__(
        self, seen: Observations, model: nn.Module | None, gpu: Gpu, on_step: Callable[[Observations], None] | None
    ) -> None:
        self.seen = seen
        self.operators = OperatorWatch(seen, lambda: self._unit, gpu)
        self._on_step = on_step
        self._before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._names: dict[int, str] = {}
        self._parameters: dict[int, str] = {}
        self._roots: list[nn.Module] = []
        self._running: list[str] = []
        self._backward_unit = ""
        self._in_backward = self._in_scaler = self._is_scaled = False
        self._scale = 1.0
        self._stepped = False
        self._paused_outside = 0
        self._saved: set[int] = set()
        if model is not None:
            self._add_root(model)

    @property
    def _unit(self) -> str:
        if self._running:
            return self._running[-1]
        return self._backward_unit if self._in_backward else ""

    # modules

    def _add_root(self, module: nn.Module) -> None:
        try:
            names = {identity: aliases[0] for identity, aliases in read_structure(module).names.items()}
        except ApplyError:
            names = {id(part): name for name, part in module.named_modules()}
        is_first = not self._roots
        self._names |= {
            identity: name if is_first else f"{type(module).__name__}{name and '.' + name}"
            for identity, name in names.items()
            if identity not in self._names
        }
        self._parameters |= {id(p): name for name, p in module.named_parameters() if id(p) not in self._parameters}
        self._roots.append(module)
        for name, part in module.named_modules():
            statistics = getattr(part, "running_var", None)
            if isinstance(part, _NormBase) and statistics is not None and statistics.dtype in HALF:
                self.seen.half_statistics[name] = statistics.dtype

    def before_module(self, module: nn.Module, args: Any) -> None:
        if not self._running:  # in a closure an optimizer, which is not looked at, calls the model
            self._paused_outside, self.operators.paused = self.operators.paused, 0
        if id(module) not in self._names and not self._running:
            self._add_root(module)
        self._running.append(self._names.get(id(module), self._running[-1] if self._running else ""))

    def after_module(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._running.pop() if self._running else ""
        if not self._running:
            self.operators.paused = self._paused_outside
        for tensor in _tensors(output):
            if tensor.requires_grad and not getattr(tensor, "_autoprec_watched", False):
                tensor._autoprec_watched = True  # type: ignore[attr-defined] # the innermost module made it
                tensor.register_hook(functools.partial(self._enter_backward, name))  # type: ignore[no-untyped-call]

    def _enter_backward(self, name: str, gradient: torch.Tensor) -> None:
        """What the pass did before it came to the first module is the cast of that module's output gradient."""
        before = self.seen.flushed.pop("", None) if not self._backward_unit else None
        self._backward_unit = name
        if before is not None:
            self.seen.flushed.setdefault(name, Flushed()).add(before)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count what is kept for the first backward pass; parameters and what was counted already are left out."""
        key = tensor.untyped_storage()._cdata
        if not self.seen.num_backwards and key not in self._saved and not isinstance(tensor, nn.Parameter):
            self._saved.add(key)
            self.operators.note_saved(tensor, self._unit)
        return tensor

    # the loop

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Replace what a loop calls, for the length of the block."""
        scaler, clip = torch.amp.GradScaler, torch.nn.utils.clip_grad
        replaced: list[tuple[Any, str, Any]] = []

        def replace(owner: Any, name: str, around: Callable[..., Any]) -> None:
            original = getattr(owner, name, None)
            if original is not None:
                replaced.append((owner, name, original))
                setattr(owner, name, functools.wraps(original)(functools.partial(around, original)))

        for name in ("scale", "unscale_", "step", "update"):
            original = getattr(scaler, name)
            replaced.append((scaler, name, original))
            setattr(scaler, name, _method(original, getattr(self, f"_scaler_{name}")))
        replace(torch.autograd, "backward", self._backward)
        for name in CLIPPING:
            for owner in (clip, torch.nn.utils):
                replace(owner, name, self._clip)
        try:
            yield
        finally:
            for owner, name, original in reversed(replaced):
                setattr(owner, name, original)

    def _backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_scaled:
            self._note_losses([tensors] if isinstance(tensors, torch.Tensor) else list(tensors))
        self._in_backward, self._backward_unit = True, ""
        paused, self.operators.paused = self.operators.paused, 0
        try:
            return original(tensors, *args, **kwargs)
        finally:
            self._in_backward, self.operators.paused = False, paused
            self.seen.num_backwards += 1
            if self._on_step is not None:
                self._on_step(self.seen)

    def _note_losses(self, losses: list[torch.Tensor]) -> None:
        for loss in losses:
            if loss.numel() == 1 and loss.is_floating_point():
                self.seen.losses.append(float(loss.detach()))
                self.seen.loss_dtypes.add(loss.dtype)

    def _scaler_scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        if scaler.is_enabled():
            self._note_losses(_tensors(outputs))
            self.seen.num_scaled += 1
            self._is_scaled = True
        with self._quietly():
            scaled = original(scaler, outputs)
            self._scale = scaler.get_scale() if scaler.is_enabled() else 1.0
        return scaled

    def _scaler_unscale_(self, original: Callable[..., Any], scaler: Any, optimizer: Any) -> Any:
        self._note_parameters(optimizer)
        with self._quietly():
            result = original(scaler, optimizer)
        if scaler.is_enabled():
            self._is_scaled = False
        return result

    def _scaler_step(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._note_parameters(optimizer)
        if not scaler.is_enabled():
            return original(scaler, optimizer, *args, **kwargs)
        self.seen.num_scaler_steps += 1
        self._is_scaled, self._stepped, self._in_scaler = False, False, True
        try:
            with self._quietly():
                self.seen.scales.append(scaler.get_scale())
                result = original(scaler, optimizer, *args, **kwargs)
        finally:
            self._in_scaler = False
        self._end_step(skipped=not self._stepped)
        return result

    def _scaler_update(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen.num_updates += scaler.is_enabled()
        with self._quietly():
            return original(scaler, *args, **kwargs)

    def _clip(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = self.seen.num_steps + 1
        if self._is_scaled and self._scale != 1.0 and step not in self.seen.clipped_while_scaled:
            self.seen.clipped_while_scaled.append(step)
        with self._quietly():
            return original(*args, **kwargs)

    def before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.operators.paused += 1
        self._note_parameters(optimizer)
        parameters = _parameters(optimizer)
        self._before = [
            (p, p.detach().clone(), p.grad != 0) for p in parameters if p.dtype in HALF and p.grad is not None
        ]
        norm = float(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        step = self.seen.num_steps + 1
        if not self._in_scaler and self._is_scaled and self._scale != 1.0:
            self.seen.stepped_while_scaled.append(step)
        elif math.isfinite(norm):
            self.seen.grad_norms.append(norm)
        if not math.isfinite(norm) and not _is_fused(optimizer):
            bad = (p for p in parameters if p.grad is not None and not bool(torch.isfinite(p.grad).all()))
            first = next(bad, None)
            if first is not None:
                self.seen.stepped_on_non_finite[step] = self._name(first)

    def after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.operators.paused -= 1
        found_inf = getattr(optimizer, "found_inf", None)
        self._stepped = found_inf is None or float(found_inf) == 0.0
        if self._stepped:
            for parameter, before, has_gradient in self._before:
                updates = self.seen.updates.setdefault(self._name(parameter), Updates())
                updates.num_values += int(has_gradient.sum())
                updates.num_lost += int(((parameter.detach() == before) & has_gradient).sum())
        self._before = []
        if not self._in_scaler:
            self._is_scaled = False
            self._end_step(skipped=False)

    def _end_step(self, *, skipped: bool) -> None:
        self.seen.num_steps += 1
        if skipped:
            self.seen.skipped.append(self.seen.num_steps)
        with self._quietly():
            for root in self._roots:
                self._look_for_poison(root)
        if self._on_step is not None:
            self._on_step(self.seen)

    def _look_for_poison(self, root: nn.Module) -> None:
        step = self.seen.num_steps
        for found, named in (
            (self.seen.poisoned_buffers, root.named_buffers()),
            (self.seen.poisoned_parameters, root.named_parameters()),
        ):
            for name, tensor in named:
                if name not in found and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                    found[name] = step

    def _note_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        halves = [p for p in _parameters(optimizer) if p.requires_grad and p.dtype in HALF]
        self.seen.half_parameters |= {self._name(p): p.dtype for p in halves}
        for group in optimizer.param_groups:
            eps, dtypes = group.get("eps"), {p.dtype for p in group["params"] if p.dtype in HALF}
            if eps and any(float(torch.tensor(eps, dtype=dtype)) == 0.0 for dtype in dtypes):
                self.seen.zero_eps[type(optimizer).__name__] = eps

    def _name(self, parameter: torch.Tensor) -> str:
        return self._parameters.get(id(parameter), f"a parameter {tuple(parameter.shape)}")

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        self.operators.paused += 1
        try:
            yield
        finally:
            self.operators.paused -= 1


def _method(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that binds like the method it stands for."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    return method


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else tensors_of(value)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """A fused optimizer skips inside its own step where the scaler found a gradient that is not finite."""
    return float(getattr(optimizer, "found_inf", None) or 0.0) > 0.0

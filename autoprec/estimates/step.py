"""One entry for memory and speed: what a training step will take on a GPU, without running it there."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoprec.errors import TaskError, UsageError
from autoprec.estimates.gpus import Gpu, gpu_by_name
from autoprec.estimates.memory import ALLOCATION_BYTES, MemoryBreakdown, peak_memory
from autoprec.estimates.recording import StepRecording, record_step
from autoprec.estimates.roofline import Roofline, StepTime, predict_time
from autoprec.estimates.settings import Loss, StepSettings
from autoprec.policy import Number, Policy

__all__ = ["StepEstimate", "UnaffordableError", "estimate_step", "real_peak"]

_LOG = logging.getLogger(__name__)

MAX_REAL_BYTES = 2 * 2**30
"""What a step may take on this machine where it must really run; most have more to spare."""


class UnaffordableError(UsageError):
    """The step could only be measured, at a shape that this machine should not try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """Memory and time of one optimizer step.

    Attributes:
        peak_memory_bytes: tensor bytes, "computed" under fake tensors, "measured" where they could not run the model.
        throughput_samples_per_second: "predicted".
        step_seconds: "predicted".
        memory: the peak by category and unit.
        time: the seconds by unit and phase, and the host's share.
        num_samples: samples of one optimizer step.
        gpu: whose peaks, bandwidth and memory are used.
        tf32: whether FP32 products ran in TF32.
        fits: whether the peak lies below the GPU's memory (context, workspaces and fragmentation come on top).
        notes: what a reader must know of these numbers.
    """

    peak_memory_bytes: Number
    throughput_samples_per_second: Number
    step_seconds: Number
    memory: MemoryBreakdown
    time: StepTime
    num_samples: int
    gpu: str
    tf32: bool
    fits: bool
    notes: tuple[str, ...]

    @property
    def by_category(self) -> Mapping[str, int]:
        return self.memory.by_category  # type: ignore[return-value]

    @property
    def by_unit(self) -> Mapping[str, int]:
        return self.memory.by_unit

    @property
    def launch_share(self) -> float:
        return self.time.launch_share


def estimate_step(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    *,
    policy: Policy | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    optimizer_settings: Mapping[str, Any] | None = None,
    optimizers: Callable[[nn.Module], Sequence[torch.optim.Optimizer]] | None = None,
    losses: Sequence[Loss] = (),
    accumulation_steps: int = 1,
    gpu: str | Gpu = "a100-80",
    batch_size: int | None = None,
    image_size: int | None = None,
    num_samples: Callable[[Any], int] | None = None,
    set_to_none: bool = True,
    foreach: bool = True,
    as_on_cuda: bool = True,
    rounding_bytes: int = ALLOCATION_BYTES,
    roofline: Roofline | None = None,
) -> StepEstimate:
    """Estimate memory and time of one training step (forward, loss, backward, optimizer) at its steady state.

    `estimate_step(model, batch, loss, policy=policy).peak_memory_bytes`

    Nothing is allocated and the model is not touched: the step runs on a copy under fake tensors. Where those cannot
    run the model, the step runs for real on a copy, at the shape asked for, and the peak is labelled measured.

    Args:
        model: a real model; what it computes in is `policy`, or the policy that it carries where that is None.
        batch: one micro-batch on any device, or a function without arguments that makes it.
        loss: `loss(model, batch)` -> scalar tensor.
        optimizer: a class, or a function from parameters to an optimizer.
        optimizers, losses: see `StepSettings`.
        accumulation_steps: micro-batches to one optimizer step.
        gpu: a name in `GPUS`.
        batch_size, image_size: rescale the batch (images alone have a size) without making it.
        num_samples: samples in a batch; None takes the first dimension of its first tensor.
        set_to_none, foreach, as_on_cuda: see `StepSettings`.
        rounding_bytes: each storage is rounded up to a multiple; 1 gives raw bytes.
        roofline: what the GPU reaches, and whether FP32 products use TF32 (they do by default).

    Raises:
        TaskError: nothing is trained by the loss. The model's own error: it cannot run this batch.
        UsageError: no such GPU, or a size below 1.
        UnaffordableError: a real step is needed, and would take more than `MAX_REAL_BYTES`.
    """
    target = gpu if isinstance(gpu, Gpu) else gpu_by_name(gpu)
    settings = StepSettings(
        policy=policy,
        optimizer=optimizer,
        optimizer_settings=optimizer_settings,
        optimizers=optimizers,
        losses=losses,
        accumulation_steps=accumulation_steps,
        set_to_none=set_to_none,
        foreach=foreach,
        as_on_cuda=as_on_cuda,
        batch_size=batch_size,
        image_size=image_size,
        num_samples=num_samples,
    )
    started = time.perf_counter()
    recording, notes = _record(model, batch, loss, settings)
    _LOG.debug("a step of %s was estimated in %.1f s", type(model).__name__, time.perf_counter() - started)
    return _estimate(
        recording, target, roofline or Roofline(), rounding_bytes, (*notes, *_gpu_notes(recording, target))
    )


def real_peak(
    model: nn.Module, batch: Any, loss: Loss, *, settings: StepSettings | None = None, rounding_bytes: int = 1
) -> MemoryBreakdown:
    """Measure the peak of one real training step on a copy of `model`, by the same tracker."""
    return peak_memory(record_step(model, batch, loss, settings=settings, fake=False), rounding_bytes=rounding_bytes)


def _record(model: nn.Module, batch: Any, loss: Loss, settings: StepSettings) -> tuple[StepRecording, tuple[str, ...]]:
    try:
        return record_step(model, batch, loss, settings=settings), ()
    except TaskError:
        raise
    except Exception as error:
        text = str(error).strip()
        reason = f"{type(error).__name__}: {text.splitlines()[0][:200] if text else ''}"
    given = dataclasses.replace(settings, batch_size=None, image_size=None)
    recording = record_step(model, batch, loss, settings=given, fake=False)
    if given != settings:
        _check_affordable(recording, settings, reason)
        recording = record_step(model, batch, loss, settings=settings, fake=False)
    return recording, (f"fake tensors could not run this step ({reason}); its memory was measured on a real step",)


def _check_affordable(recording: StepRecording, settings: StepSettings, reason: str) -> None:
    """Refuse a real step at the shape asked for, if what the given batch takes says that it would take too much here.

    The whole peak is taken to grow with the batch: an upper bound, since parameters do not.
    """
    if settings.batch_size is None:
        return
    samples = recording.num_samples / settings.accumulation_steps
    expected = peak_memory(recording).peak_bytes * settings.batch_size / samples
    if expected > MAX_REAL_BYTES:
        raise UnaffordableError(
            f"batch_size: found {settings.batch_size:,}; fake tensors cannot run this step ({reason}), and a real one"
            f" would take up to {expected / 2**30:.1f} GiB here; allowed: up to"
            f" {int(settings.batch_size * MAX_REAL_BYTES / expected):,}"
        )


def _estimate(
    recording: StepRecording, gpu: Gpu, roofline: Roofline, rounding_bytes: int, notes: tuple[str, ...]
) -> StepEstimate:
    memory = peak_memory(recording, rounding_bytes=rounding_bytes)
    time = predict_time(recording, gpu, roofline=roofline)
    return StepEstimate(
        peak_memory_bytes=Number(value=float(memory.peak_bytes), kind="computed" if recording.fake else "measured"),
        throughput_samples_per_second=Number(value=recording.num_samples / time.step_seconds, kind="predicted"),
        step_seconds=Number(value=time.step_seconds, kind="predicted"),
        memory=memory,
        time=time,
        num_samples=recording.num_samples,
        gpu=gpu.name,
        tf32=roofline.tf32 and gpu.tf32_tflops is not None,
        fits=memory.peak_bytes < gpu.memory_bytes,
        notes=notes,
    )


def _gpu_notes(recording: StepRecording, gpu: Gpu) -> tuple[str, ...]:
    uses_bf16 = any(operation.dtype is torch.bfloat16 for operation in recording.operations)
    if uses_bf16 and not gpu.native_bf16:
        return (f"{gpu.product} has no BF16 units: BF16 products are predicted at its FP32 peak",)
    return ()

"""Memory computed and throughput predicted, without running: one training step under fake tensors, and a roofline."""

from autoprec.estimates.budget import Estimate, Remedy, find_remedies, largest_batch
from autoprec.estimates.gpus import GPUS, Gpu, gpu_by_name
from autoprec.estimates.memory import MemoryBreakdown, peak_memory
from autoprec.estimates.ratio_interval import RATIO_ERROR, throughput_ratio_interval
from autoprec.estimates.recording import StepRecording, record_step
from autoprec.estimates.roofline import Roofline, StepTime, predict_time
from autoprec.estimates.settings import StepSettings
from autoprec.estimates.step import StepEstimate, UnaffordableError, estimate_step, real_peak

__all__ = [
    "GPUS",
    "RATIO_ERROR",
    "Estimate",
    "Gpu",
    "MemoryBreakdown",
    "Remedy",
    "Roofline",
    "StepEstimate",
    "StepRecording",
    "StepSettings",
    "StepTime",
    "UnaffordableError",
    "estimate_step",
    "find_remedies",
    "gpu_by_name",
    "largest_batch",
    "peak_memory",
    "predict_time",
    "real_peak",
    "record_step",
    "throughput_ratio_interval",
]

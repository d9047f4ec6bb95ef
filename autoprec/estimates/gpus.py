"""GPUs as data: dense peaks, bandwidth and memory from the vendors' data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autoprec.errors import UsageError, did_you_mean

__all__ = ["Gpu", "GPUS", "ALIASES", "gpu_by_name"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Peaks are dense TFLOP/s; FP16 and BF16 accumulate in FP32; None where the hardware has no such units.

    Attributes:
        name: the key in `GPUS`.
        product: the vendor's own name.
        fp32_tflops: FP32 outside tensor cores.
        tf32_tflops: FP32 products on tensor cores in TF32.
        fp16_tflops: FP16 tensor cores.
        bf16_tflops: BF16 tensor cores; None means that BF16 is emulated there.
        bandwidth_gb_per_second: memory bandwidth, 1e9 bytes a second.
        memory_gb: memory in the vendor's GB, taken as GiB.
        source: the data sheet.
    """

    name: str
    product: str
    fp32_tflops: float
    tf32_tflops: float | None
    fp16_tflops: float
    bf16_tflops: float | None
    bandwidth_gb_per_second: float
    memory_gb: int
    source: str

    @property
    def native_bf16(self) -> bool:
        return self.bf16_tflops is not None

    @property
    def memory_bytes(self) -> int:
        return self.memory_gb * 2**30


_V100 = "NVIDIA V100 Tensor Core GPU data sheet (SXM2), 2020"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet (SXM), 2021"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet (SXM5), 2023"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet (SXM), 2024"
_GA102 = "NVIDIA Ampere GA102 GPU architecture white paper, 2020, appendix A"
_AD102 = "NVIDIA Ada GPU architecture white paper, 2022, appendix A"

_TABLE = (
    Gpu("t4", "NVIDIA T4", 8.1, None, 65.0, None, 320, 16, "NVIDIA T4 Tensor Core GPU data sheet, 2019"),
    Gpu("v100-16", "NVIDIA V100 SXM2 16 GB", 15.7, None, 125.0, None, 900, 16, _V100),
    Gpu("v100-32", "NVIDIA V100 SXM2 32 GB", 15.7, None, 125.0, None, 900, 32, _V100),
    Gpu("a10", "NVIDIA A10", 31.2, 62.5, 125.0, 125.0, 600, 24, "NVIDIA A10 Tensor Core GPU data sheet, 2021"),
    Gpu("l4", "NVIDIA L4", 30.3, 60.0, 121.0, 121.0, 300, 24, "NVIDIA L4 Tensor Core GPU data sheet, 2023"),
    Gpu("a100-40", "NVIDIA A100 SXM 40 GB", 19.5, 156.0, 312.0, 312.0, 1555, 40, _A100),
    Gpu("a100-80", "NVIDIA A100 SXM 80 GB", 19.5, 156.0, 312.0, 312.0, 2039, 80, _A100),
    Gpu("rtx-3090", "NVIDIA GeForce RTX 3090", 35.6, 35.6, 71.0, 71.0, 936, 24, _GA102),
    Gpu("rtx-4090", "NVIDIA GeForce RTX 4090", 82.6, 82.6, 165.2, 165.2, 1008, 24, _AD102),
    Gpu("h100", "NVIDIA H100 SXM", 67.0, 494.7, 989.4, 989.4, 3350, 80, _H100),
    Gpu("h200", "NVIDIA H200 SXM", 67.0, 494.7, 989.4, 989.4, 4800, 141, _H200),
)

GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _TABLE}
ALIASES: dict[str, str] = {"v100": "v100-16", "a100": "a100-80", "3090": "rtx-3090", "4090": "rtx-4090"}


def gpu_by_name(name: str) -> Gpu:
    """Return the GPU called `name`: `"a100-80"`, `"a100"`, `"A100 80GB"` and `"NVIDIA A100-SXM4-80GB"` are one.

    Raises:
        UsageError: no such GPU; the message lists all and the nearest.
    """
    key = _normalise(name)
    key = ALIASES.get(key, key)
    if key in GPUS:
        return GPUS[key]
    allowed = [*GPUS, *ALIASES]
    raise UsageError(f"gpu: found {name[:80]!r}; allowed: {', '.join(allowed)}{did_you_mean(key, allowed)}")


def _normalise(name: str) -> str:
    words = re.split(r"[\s_/-]+", name.strip().lower())
    noise = re.compile(r"nvidia|tesla|geforce|sxm\d*|pcie|gpu|tensor|core|hbm\d*e?|80gb?hbm\d*|")
    kept = [re.sub(r"(?<=\d)gb?$", "", word) for word in words if not noise.fullmatch(word)]
    key = "-".join(kept)
    key = re.sub(r"^rtx-?(\d+)$", r"rtx-\1", key)
    return re.sub(r"^(t4|l4|a10|rtx-\d+|h100|h200)-\d+$", r"\1", key)

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


_TURING = "NVIDIA Turing GPU architecture white paper, 2018, appendix A"
_V100 = "NVIDIA V100 Tensor Core GPU data sheet (SXM2), 2020"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet, 2021"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet, 2023"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet (SXM), 2024"
_B200 = "NVIDIA HGX B200 data sheet, 2024, an eighth of it"
_GA102 = "NVIDIA Ampere GA102 GPU architecture white paper, 2020, appendix A"
_AD102 = "NVIDIA Ada GPU architecture white paper, 2022, appendix A"
_GB202 = "NVIDIA RTX Blackwell GPU architecture white paper, 2025, appendix A"
_RTX_3060 = "NVIDIA GeForce RTX 3060 (12 GB) specifications, 2021; tensor cores at the rates of GA102"
_RTX_4070 = "NVIDIA GeForce RTX 4070 specifications, 2023; tensor cores at the rates of AD102"
_MI250X = "AMD Instinct MI250X data sheet, 2021, one of its two devices; FP32 of the matrix cores"
_MI300X = "AMD Instinct MI300X data sheet, 2023"

_TABLE = (
    Gpu("t4", "NVIDIA T4", 8.1, None, 65.0, None, 320, 16, "NVIDIA T4 Tensor Core GPU data sheet, 2019"),
    Gpu("v100-16", "NVIDIA V100 SXM2 16 GB", 15.7, None, 125.0, None, 900, 16, _V100),
    Gpu("v100-32", "NVIDIA V100 SXM2 32 GB", 15.7, None, 125.0, None, 900, 32, _V100),
    Gpu("rtx-2080-ti", "NVIDIA GeForce RTX 2080 Ti", 13.4, None, 53.8, None, 616, 11, _TURING),
    Gpu("titan-rtx", "NVIDIA TITAN RTX", 16.3, None, 130.5, None, 672, 24, _TURING),
    Gpu("rtx-8000", "NVIDIA Quadro RTX 8000", 16.3, None, 130.5, None, 672, 48, _TURING),
    Gpu("a10", "NVIDIA A10", 31.2, 62.5, 125.0, 125.0, 600, 24, "NVIDIA A10 Tensor Core GPU data sheet, 2021"),
    Gpu("a40", "NVIDIA A40", 37.4, 74.8, 149.7, 149.7, 696, 48, "NVIDIA A40 data sheet, 2021"),
    Gpu("rtx-a6000", "NVIDIA RTX A6000", 38.7, 77.4, 154.8, 154.8, 768, 48, _GA102),
    Gpu("a100-40", "NVIDIA A100 SXM 40 GB", 19.5, 156.0, 312.0, 312.0, 1555, 40, _A100),
    Gpu("a100-80", "NVIDIA A100 SXM 80 GB", 19.5, 156.0, 312.0, 312.0, 2039, 80, _A100),
    Gpu("a100-40-pcie", "NVIDIA A100 PCIe 40 GB", 19.5, 156.0, 312.0, 312.0, 1555, 40, _A100),
    Gpu("a100-80-pcie", "NVIDIA A100 PCIe 80 GB", 19.5, 156.0, 312.0, 312.0, 1935, 80, _A100),
    Gpu("rtx-3060", "NVIDIA GeForce RTX 3060", 12.7, 12.7, 25.5, 25.5, 360, 12, _RTX_3060),
    Gpu("rtx-3090", "NVIDIA GeForce RTX 3090", 35.6, 35.6, 71.0, 71.0, 936, 24, _GA102),
    Gpu("l4", "NVIDIA L4", 30.3, 60.0, 121.0, 121.0, 300, 24, "NVIDIA L4 Tensor Core GPU data sheet, 2023"),
    Gpu("l40s", "NVIDIA L40S", 91.6, 183.0, 362.0, 362.0, 864, 48, "NVIDIA L40S data sheet, 2023"),
    Gpu("rtx-6000-ada", "NVIDIA RTX 6000 Ada Generation", 91.1, 182.1, 364.2, 364.2, 960, 48, _AD102),
    Gpu("rtx-4070", "NVIDIA GeForce RTX 4070", 29.1, 29.1, 58.3, 58.3, 504, 12, _RTX_4070),
    Gpu("rtx-4090", "NVIDIA GeForce RTX 4090", 82.6, 82.6, 165.2, 165.2, 1008, 24, _AD102),
    Gpu("rtx-5090", "NVIDIA GeForce RTX 5090", 104.8, 104.8, 209.5, 209.5, 1792, 32, _GB202),
    Gpu("h100", "NVIDIA H100 SXM", 67.0, 494.7, 989.4, 989.4, 3350, 80, _H100),
    Gpu("h100-pcie", "NVIDIA H100 PCIe", 51.0, 378.0, 756.0, 756.0, 2000, 80, _H100),
    Gpu("h200", "NVIDIA H200 SXM", 67.0, 494.7, 989.4, 989.4, 4800, 141, _H200),
    Gpu("b200", "NVIDIA B200 SXM", 75.0, 1125.0, 2250.0, 2250.0, 8000, 180, _B200),
    Gpu("mi250x", "AMD Instinct MI250X, one device", 47.9, None, 191.5, 191.5, 1638, 64, _MI250X),
    Gpu("mi300x", "AMD Instinct MI300X", 163.4, 653.7, 1307.4, 1307.4, 5300, 192, _MI300X),
)

GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _TABLE}
ALIASES: dict[str, str] = {
    "v100": "v100-16",
    "a100": "a100-80",
    "a100-pcie": "a100-80-pcie",
    "a6000": "rtx-a6000",
    "2080-ti": "rtx-2080-ti",
    **{name.removeprefix("rtx-"): name for name in ("rtx-3060", "rtx-3090", "rtx-4070", "rtx-4090", "rtx-5090")},
}


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
    noise = re.compile(
        r"nvidia|amd|instinct|tesla|quadro|geforce|generation|sxm\d*|pcie|gpu|tensor|core|hbm\d*e?|80gb?hbm\d*|"
    )
    kept = [re.sub(r"(?<=\d)gb?$", "", word) for word in words if not noise.fullmatch(word)]
    key = "-".join(kept)
    key = re.sub(r"^rtx-?(\d+)", r"rtx-\1", key)
    key = re.sub(r"^(t4|l4|l40s|a10|a40|rtx-a?\d+|h100|h200|b200|mi\d+x)-\d+$", r"\1", key)
    return f"{key}-pcie" if "pcie" in words and f"{key}-pcie" in {*GPUS, *ALIASES} else key

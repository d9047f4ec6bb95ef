from __future__ import annotations

import pytest

from autoprec.errors import UsageError
from autoprec.estimates import GPUS, Gpu, gpu_by_name


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("a100", "a100-80"),
        ("A100-40", "a100-40"),
        ("A100 80GB", "a100-80"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("v100", "v100-16"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("Tesla T4", "t4"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("rtx4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("H200", "h200"),
        ("NVIDIA A100-PCIE-40GB", "a100-40-pcie"),
        ("NVIDIA A100 80GB PCIe", "a100-80-pcie"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx-2080-ti"),
        ("Quadro RTX 8000", "rtx-8000"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_gpu_is_found_by_its_own_and_its_product_name(name: str, key: str) -> None:
    assert gpu_by_name(name).name == key


@pytest.mark.parametrize("name", ["a1000", "h300", "", "cpu"])
def test_an_unknown_gpu_is_refused_with_all_names(name: str) -> None:
    with pytest.raises(UsageError, match="allowed: t4, v100-16"):
        gpu_by_name(name)


def test_a_misspelt_gpu_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"nearest: .*a100-80"):
        gpu_by_name("a100-8")


def test_bf16_is_native_from_ampere_on() -> None:
    assert {name for name, gpu in GPUS.items() if not gpu.native_bf16} == {
        "t4", "v100-16", "v100-32", "rtx-2080-ti", "titan-rtx", "rtx-8000",
    }  # fmt: skip


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_a_row_keeps_the_ratios_of_its_tensor_cores(gpu: Gpu) -> None:
    """TF32 runs at half the rate of FP16 wherever it exists; BF16 at the rate of FP16; products beat ordinary FP32."""
    assert gpu.fp16_tflops >= 1.9 * gpu.fp32_tflops
    assert gpu.bf16_tflops in (None, gpu.fp16_tflops)
    assert gpu.tf32_tflops is None or gpu.tf32_tflops == pytest.approx(gpu.fp16_tflops / 2, rel=0.02)
    assert (gpu.tf32_tflops is None) == (gpu.bf16_tflops is None) or gpu.name == "mi250x"  # no TF32 before MI300
    assert gpu.source


def test_memory_is_counted_in_gib() -> None:
    assert gpu_by_name("t4").memory_bytes == 17179869184

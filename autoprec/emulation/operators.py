"""Operators that are computed in FP32 and rounded, as a table.

Three reasons put one here: it is a product, which torch computes 8 to 100 times slower in FP16 on a CPU; CUDA
accumulates it in FP32 where the CPU rounds partial sums to half; or CUDA has it in half and the CPU has not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["Rounding", "roundings", "functional_twins", "overload"]


@dataclass(frozen=True, slots=True)
class Rounding:
    """How to treat one operator.

    `free` are the positions of arguments whose dtype may differ from the others' (saved statistics); the first
    `num_rounded` outputs are rounded to half and the others stay FP32 (None: all are rounded).
    """

    free: tuple[int, ...] = ()
    num_rounded: int | None = None


_PRODUCTS = (
    "mm addmm bmm baddbmm addbmm mv addmv dot vdot addr _trilinear _addmm_activation "
    "convolution convolution_backward conv_tbc conv_tbc_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward "
    "_native_multi_head_attention _transformer_encoder_layer_fwd"
)
_ACCUMULATIONS = (
    "embedding_dense_backward col2im grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward "
    "_adaptive_avg_pool3d native_group_norm_backward"
)
_MISSING_ON_CPU = (
    "avg_pool3d avg_pool3d_backward multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_forward "
    "multilabel_margin_loss_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa "
    "_upsample_bicubic2d_aa_backward"
)
_WITH_STATISTICS = {
    "_scaled_dot_product_flash_attention_for_cpu": Rounding(num_rounded=1),
    "_scaled_dot_product_flash_attention_for_cpu_backward": Rounding(free=(5,)),
    "native_layer_norm": Rounding(num_rounded=1),
    "native_layer_norm_backward": Rounding(free=(3, 4)),
    "native_batch_norm": Rounding(free=(3, 4), num_rounded=1),
    "native_batch_norm_backward": Rounding(free=(3, 4, 5, 6)),
}
_IN_PLACE = "addmm_ baddbmm_ addbmm_ addmv_ addr_"
_WITH_OUT = "mm addmm bmm baddbmm addbmm mv addmv dot vdot addr"


def overload(name: str) -> torch._ops.OpOverload | None:
    """Return the aten overload called `name` ("mm", "mm.out"), or None where the installed torch has none."""
    packet, _, suffix = name.partition(".")
    found: torch._ops.OpOverload | None = getattr(getattr(torch.ops.aten, packet, None), suffix or "default", None)
    return found


def roundings() -> Iterator[tuple[torch._ops.OpOverload, Rounding]]:
    """Yield the functional operators of the installed torch that are computed in FP32."""
    names = " ".join((_PRODUCTS, _ACCUMULATIONS, _MISSING_ON_CPU)).split()
    for name, rounding in {**dict.fromkeys(names, Rounding()), **_WITH_STATISTICS}.items():
        if (operator := overload(name)) is not None:
            yield operator, rounding


def functional_twins() -> Iterator[tuple[torch._ops.OpOverload, torch._ops.OpOverload]]:
    """Yield (in-place or out= overload, functional overload) of the products."""
    pairs = [(name, name.removesuffix("_")) for name in _IN_PLACE.split()]
    pairs += [(f"{name}.out", name) for name in _WITH_OUT.split()]
    for variant, functional in pairs:
        operator, twin = overload(variant), overload(functional)
        if operator is not None and twin is not None:
            yield operator, twin

"""CUDA autocast's operator rules as a table of qualified operator names.

Source: torch 2.14.1, `torch/include/ATen/autocast_mode.h` (the AT_FORALL_* macros). What the header does not name was
read from the dispatcher of the same wheel: the ban of binary_cross_entropy, `linalg_matrix_sqrth`, cuDNN's entries and
torchvision 0.29.1's. A rule holds only where the installed torch has an AutocastCUDA kernel for its operator, so an
older or newer torch follows its own lists.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = [
    "Policy",
    "RULES",
    "LIKE_CUDA_ON_CPU",
    "CUDNN_RECURRENT",
    "NEVER_ON_CPU",
    "SOURCE_TORCH_VERSION",
]

SOURCE_TORCH_VERSION = "2.14.1"


class Policy(StrEnum):
    """What autocast does with the floating tensors that an operator receives. float64 is never touched."""

    LOWER_PRECISION = "lower_precision_fp"
    """Cast to autocast's dtype; casts of trainable FP32 leaves are cached."""
    FP32 = "fp32"
    """Cast to FP32."""
    FP32_SET_OPT_DTYPE = "fp32_set_opt_dtype"
    """Ask the operator for an FP32 result unless the caller named a dtype."""
    FP32_APPEND_DTYPE = "fp32_append_dtype"
    """Call the overload that takes a dtype, with FP32."""
    PROMOTE = "promote"
    """Cast to FP32 where any input is FP32, else leave in autocast's dtype."""
    BANNED = "banned"
    """Refuse the call."""
    FP32_INPUT_DTYPE = "fp32_input_dtype"
    """Compute in FP32 and give the result the dtype of the first input (torchvision)."""


def _names(names: str, *, namespace: str = "aten") -> tuple[str, ...]:
    return tuple(f"{namespace}::{name}" for name in names.split())


_OPERATORS: dict[Policy, tuple[str, ...]] = {
    Policy.LOWER_PRECISION: _names(
        """
        _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
        conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose _cudnn_rnn prelu addmm addmv
        addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
        _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
        _scaled_dot_product_flash_attention scaled_dot_product_attention
        """
    ),
    Policy.FP32: (
        *_names(
            """
            acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
            pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
            nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
            hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
            multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
            binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
            _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
            _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
            upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa linalg_matrix_sqrth
            """
        ),
        "torchvision::nms",
    ),
    Policy.FP32_SET_OPT_DTYPE: _names(
        """
        prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
        linalg_matrix_norm.str_ord sum sum.dim_IntList
        """
    ),
    Policy.FP32_APPEND_DTYPE: _names("norm.Scalar norm.ScalarOpt_dim"),
    Policy.PROMOTE: _names(
        "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
    ),
    Policy.BANNED: _names("binary_cross_entropy"),
    Policy.FP32_INPUT_DTYPE: _names(
        "deform_conv2d ps_roi_align ps_roi_pool roi_align roi_pool", namespace="torchvision"
    ),
}

RULES: dict[str, Policy] = {name: policy for policy, names in _OPERATORS.items() for name in names}
"""Qualified operator name, as the dispatcher spells it -> policy."""

LIKE_CUDA_ON_CPU: frozenset[str] = frozenset(
    _names(
        """
        _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
        conv_transpose3d.input prelu addmm matmul mm linalg_vecdot linear addbmm baddbmm bmm
        scaled_dot_product_attention conv1d.padding conv2d.padding conv3d.padding
        """
    )
)
"""Operators whose own AutocastCPU kernel already casts to autocast's dtype with torch's weight cache: left as they are.

The `.padding` overloads have no CUDA entry; there the convolution that they call casts the same tensors."""

CUDNN_RECURRENT: tuple[str, ...] = _names(
    """
    lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data
    """
)
"""What reaches `_cudnn_rnn` on CUDA, where input, states and weights are cast to autocast's dtype, weights uncached."""

NEVER_ON_CPU: frozenset[str] = frozenset(
    _names(
        """
        cudnn_convolution cudnn_convolution_transpose _cudnn_rnn _thnn_fused_lstm_cell _thnn_fused_gru_cell
        _scaled_dot_product_flash_attention
        """
    )
)
"""Operators that CUDA's kernels alone reach; the rules of what calls them stand for theirs on a CPU."""

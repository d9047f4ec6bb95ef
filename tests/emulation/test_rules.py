"""The rules of CUDA autocast: the table against the installed torch, and every rule against what a call returns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision  # noqa: F401  (registers its operators)

from autoprec.emulation import autocast, cuda_autocast_rules, rules
from autoprec.emulation.rules import CUDNN_RECURRENT, LIKE_CUDA_ON_CPU, NEVER_ON_CPU, RULES, Policy

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
MACROS = {
    "AT_FORALL_LOWER_PRECISION_FP": Policy.LOWER_PRECISION,
    "AT_FORALL_FP32": Policy.FP32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": Policy.FP32_SET_OPT_DTYPE,
    "AT_FORALL_PROMOTE": Policy.PROMOTE,
}

Make = Callable[..., torch.Tensor]


def _split(names: str) -> list[str]:
    return names.split()


LABELS = [0, 1, 2, 0]
CONVOLUTION = ([1], [0], [1], False, [0], 1)

# name -> arguments; `t(*shape)` makes a floating tensor of the dtype and device under test, `i(values)` an integer one
CALLS: dict[str, Callable[[Make, Make], tuple[Any, ...]]] = {
    "_convolution.deprecated": lambda t, i: (t(1, 2, 5), t(3, 2, 2), None, *CONVOLUTION, False, False, False),
    "_convolution": lambda t, i: (t(1, 2, 5), t(3, 2, 2), None, *CONVOLUTION, False, False, False, False),
    "convolution": lambda t, i: (t(1, 2, 5), t(3, 2, 2), None, *CONVOLUTION),
    "conv1d": lambda t, i: (t(1, 2, 5), t(3, 2, 2)),
    "conv2d": lambda t, i: (t(1, 2, 5, 5), t(3, 2, 2, 2)),
    "conv3d": lambda t, i: (t(1, 2, 5, 5, 5), t(3, 2, 2, 2, 2)),
    "conv_tbc": lambda t, i: (t(5, 1, 2), t(2, 2, 3), t(3)),
    "conv_transpose1d": lambda t, i: (t(1, 2, 5), t(2, 3, 2)),
    "conv_transpose2d.input": lambda t, i: (t(1, 2, 5, 5), t(2, 3, 2, 2)),
    "conv_transpose3d.input": lambda t, i: (t(1, 2, 5, 5, 5), t(2, 3, 2, 2, 2)),
    "prelu": lambda t, i: (t(2, 3), t(3)),
    "addmm": lambda t, i: (t(2, 4), t(2, 3), t(3, 4)),
    "addmv": lambda t, i: (t(2), t(2, 3), t(3)),
    "addr": lambda t, i: (t(2, 3), t(2), t(3)),
    "matmul": lambda t, i: (t(2, 3), t(3, 4)),
    "einsum": lambda t, i: ("ij,jk->ik", [t(2, 3), t(3, 4)]),
    "mm": lambda t, i: (t(2, 3), t(3, 4)),
    "mv": lambda t, i: (t(2, 3), t(3)),
    "linalg_vecdot": lambda t, i: (t(2, 3), t(2, 3)),
    "linear": lambda t, i: (t(2, 3), t(4, 3)),
    "addbmm": lambda t, i: (t(2, 4), t(2, 2, 3), t(2, 3, 4)),
    "baddbmm": lambda t, i: (t(2, 2, 4), t(2, 2, 3), t(2, 3, 4)),
    "bmm": lambda t, i: (t(2, 2, 3), t(2, 3, 4)),
    "chain_matmul": lambda t, i: ([t(2, 3), t(3, 4), t(4, 2)],),
    "linalg_multi_dot": lambda t, i: ([t(2, 3), t(3, 4), t(4, 2)],),
    "lstm_cell": lambda t, i: (t(2, 3), [t(2, 4), t(2, 4)], t(16, 3), t(16, 4), t(16), t(16)),
    "gru_cell": lambda t, i: (t(2, 3), t(2, 4), t(12, 3), t(12, 4), t(12), t(12)),
    "rnn_tanh_cell": lambda t, i: (t(2, 3), t(2, 4), t(4, 3), t(4, 4), t(4), t(4)),
    "rnn_relu_cell": lambda t, i: (t(2, 3), t(2, 4), t(4, 3), t(4, 4), t(4), t(4)),
    "scaled_dot_product_attention": lambda t, i: (t(1, 2, 3, 4), t(1, 2, 3, 4), t(1, 2, 3, 4)),
    **{
        name: lambda t, i: (t(3),)
        for name in _split(
            "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan softplus prod sum "
            "linalg_vector_norm"
        )
    },
    "nuclear_norm": lambda t, i: (t(3, 3),),
    "pow.Tensor_Scalar": lambda t, i: (t(3), 2),
    "pow.Tensor_Tensor": lambda t, i: (t(3), t(3)),
    "pow.Scalar": lambda t, i: (2, t(3)),
    "layer_norm": lambda t, i: (t(2, 3), [3], t(3), t(3)),
    "native_layer_norm": lambda t, i: (t(2, 3), [3], t(3), t(3), 1e-5),
    "rms_norm": lambda t, i: (t(2, 3), [3], t(3)),
    "group_norm": lambda t, i: (t(2, 4, 3), 2),
    "frobenius_norm.dim": lambda t, i: (t(2, 3), [1]),
    "nuclear_norm.dim": lambda t, i: (t(2, 3), [0, 1]),
    "cosine_similarity": lambda t, i: (t(2, 3), t(2, 3)),
    "poisson_nll_loss": lambda t, i: (t(3), t(3), True, False, 1e-8, 1),
    "cosine_embedding_loss": lambda t, i: (t(4, 3), t(4, 3), i([1, -1, 1, 1])),
    "nll_loss": lambda t, i: (t(4, 3), i(LABELS)),
    "nll_loss2d": lambda t, i: (t(1, 3, 2, 2), i([[[0, 1], [2, 0]]])),
    **{
        name: lambda t, i: (t(4, 3), t(4, 3))
        for name in _split(
            "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss soft_margin_loss "
            "binary_cross_entropy_with_logits binary_cross_entropy dist cdist atan2"
        )
    },
    "margin_ranking_loss": lambda t, i: (t(4), t(4), t(4)),
    "multilabel_margin_loss": lambda t, i: (t(1, 4), i([LABELS])),
    "triplet_margin_loss": lambda t, i: (t(4, 3), t(4, 3), t(4, 3)),
    "multi_margin_loss": lambda t, i: (t(4, 3), i(LABELS)),
    "pdist": lambda t, i: (t(4, 3),),
    "renorm": lambda t, i: (t(2, 3), 2, 0, 1.0),
    "logsumexp": lambda t, i: (t(2, 3), [1]),
    "upsample_nearest1d": lambda t, i: (t(1, 1, 4), [8]),
    "_upsample_nearest_exact1d": lambda t, i: (t(1, 1, 4), [8]),
    "upsample_nearest2d": lambda t, i: (t(1, 1, 4, 4), [8, 8]),
    "_upsample_nearest_exact2d": lambda t, i: (t(1, 1, 4, 4), [8, 8]),
    "upsample_nearest3d": lambda t, i: (t(1, 1, 4, 4, 4), [8, 8, 8]),
    "_upsample_nearest_exact3d": lambda t, i: (t(1, 1, 4, 4, 4), [8, 8, 8]),
    "upsample_linear1d": lambda t, i: (t(1, 1, 4), [8], False),
    "upsample_bilinear2d": lambda t, i: (t(1, 1, 4, 4), [8, 8], False),
    "_upsample_bilinear2d_aa": lambda t, i: (t(1, 1, 4, 4), [8, 8], False),
    "upsample_trilinear3d": lambda t, i: (t(1, 1, 4, 4, 4), [8, 8, 8], False),
    "upsample_bicubic2d": lambda t, i: (t(1, 1, 4, 4), [8, 8], False),
    "_upsample_bicubic2d_aa": lambda t, i: (t(1, 1, 4, 4), [8, 8], False),
    "linalg_matrix_sqrth": lambda t, i: (t(3, 3),),
    "prod.dim_int": lambda t, i: (t(2, 3), 1),
    "softmax.int": lambda t, i: (t(2, 3), 1),
    "log_softmax.int": lambda t, i: (t(2, 3), 1),
    "cumprod": lambda t, i: (t(2, 3), 1),
    "cumsum": lambda t, i: (t(2, 3), 1),
    "linalg_matrix_norm": lambda t, i: (t(2, 3), 1),
    "linalg_matrix_norm.str_ord": lambda t, i: (t(2, 3),),
    "sum.dim_IntList": lambda t, i: (t(2, 3), [1]),
    "norm.Scalar": lambda t, i: (t(2, 3),),
    "norm.ScalarOpt_dim": lambda t, i: (t(2, 3), 2, [1]),
    "addcdiv": lambda t, i: (t(3), t(3), t(3)),
    "addcmul": lambda t, i: (t(3), t(3), t(3)),
    "bilinear": lambda t, i: (t(2, 3), t(2, 3), t(4, 3, 3)),
    "cross": lambda t, i: (t(2, 3), t(2, 3), 1),
    "dot": lambda t, i: (t(3), t(3)),
    "vdot": lambda t, i: (t(3), t(3)),
    "grid_sampler": lambda t, i: (t(1, 1, 4, 4), t(1, 2, 2, 2), 0, 0, False),
    "index_put": lambda t, i: (t(3), [i([0, 1])], t(2)),
    "tensordot": lambda t, i: (t(2, 3), t(3, 2), [1], [0]),
    "scatter_add": lambda t, i: (t(3), 0, i([0, 1]), t(2)),
    "torchvision::nms": lambda t, i: (t(2, 4), t(2), 0.5),
    "torchvision::roi_align": lambda t, i: (t(1, 1, 8, 8), t(1, 5), 1.0, 2, 2, 1, False),
    "torchvision::roi_pool": lambda t, i: (t(1, 1, 8, 8), t(1, 5), 1.0, 2, 2),
    "torchvision::ps_roi_align": lambda t, i: (t(1, 4, 8, 8), t(1, 5), 1.0, 2, 2, 1),
    "torchvision::ps_roi_pool": lambda t, i: (t(1, 4, 8, 8), t(1, 5), 1.0, 2, 2),
    "torchvision::deform_conv2d": lambda t, i: (
        t(1, 2, 5, 5), t(3, 2, 2, 2), t(1, 8, 4, 4), t(1, 4, 4, 4), t(3), 1, 1, 0, 0, 1, 1, 1, 1, True,
    ),
}  # fmt: skip
CALLS = {name if "::" in name else f"aten::{name}": call for name, call in CALLS.items()}
INSTALLED = [name for name in CALLS if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")]
CALLED = [name for name in INSTALLED if RULES[name] is not Policy.BANNED]


def overload(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    packet, _, suffix = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), suffix or "default")


def call(name: str, dtype: torch.dtype, device: str, first: torch.dtype | None = None) -> list[torch.dtype]:
    """Call an operator and return the dtypes of its results; `first` is another dtype for its first tensor."""
    made = 0

    def t(*shape: int) -> torch.Tensor:
        nonlocal made
        made += 1
        own = first if first is not None and made == 1 else dtype
        return torch.full(shape, 0.5, dtype=own, device=device)

    result = overload(name)(*CALLS[name](t, lambda values: torch.tensor(values, device=device)))
    results = result if isinstance(result, (tuple, list)) else [result]
    return [r.dtype for r in results if isinstance(r, torch.Tensor)]


@contextmanager
def emulated_autocast(dtype: torch.dtype = HALF) -> Iterator[None]:
    with cuda_autocast_rules(), torch.autocast("cpu", dtype):
        yield


def header_rules() -> dict[str, Policy]:
    """Parse torch's header into the form of the table."""
    text = HEADER.read_text()
    found: dict[str, Policy] = {}
    for macro, policy in MACROS.items():
        body = re.search(rf"#define {macro}\(_\)(.*?)\n\n", text, re.S)
        assert body is not None, macro
        for name, suffix in re.findall(r"_\((\w+)(?:, (\w+))?\)", body.group(1)):
            found[f"aten::{name}" + (f".{suffix}" if suffix else "")] = policy
    for name in re.findall(r'"(norm\.\w+)"', text):
        found[f"aten::{name}"] = Policy.FP32_APPEND_DTYPE
    return found


def test_the_table_says_what_the_header_of_the_installed_torch_says() -> None:
    found = header_rules()
    assert len(found) > 100
    assert {name: RULES.get(name) for name in found} == found


def test_every_operator_with_a_cuda_autocast_kernel_has_a_rule() -> None:
    assert autocast.unknown_rules() == []


def test_every_rule_of_this_torch_version_exists() -> None:
    if not torch.__version__.startswith(rules.SOURCE_TORCH_VERSION):
        pytest.skip(f"the table was read from torch {rules.SOURCE_TORCH_VERSION}")
    assert [n for n in RULES if not torch._C._dispatch_has_kernel_for_dispatch_key(n, "AutocastCUDA")] == []


def test_every_rule_that_a_cpu_can_reach_is_called_by_these_tests() -> None:
    assert RULES.keys() - NEVER_ON_CPU - CALLS.keys() == set()


def outcome(name: str, dtype: torch.dtype, device: str) -> list[torch.dtype] | str:
    try:
        return call(name, dtype, device)
    except (RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {str(error)[:80]}"


@pytest.fixture(scope="module")
def emulated_outcomes() -> dict[tuple[str, torch.dtype], list[torch.dtype] | str]:
    with emulated_autocast():
        return {(name, dtype): outcome(name, dtype, "cpu") for name in CALLED for dtype in (HALF, SINGLE)}


@pytest.fixture(scope="module")
def cuda_outcomes(real_cuda_autocast: Any) -> dict[tuple[str, torch.dtype], list[torch.dtype] | str]:
    keys = [(name, dtype) for name in CALLED for dtype in (HALF, SINGLE) if name not in NO_FAKE]
    with real_cuda_autocast():
        return {(name, dtype): outcome(name, dtype, "cuda") for name, dtype in keys}


# the cuDNN cell asks for a driver and these torchvision operators have no fake kernel
NO_FAKE = {
    "aten::gru_cell",
    *(f"torchvision::{n}" for n in ["nms", "roi_pool", "ps_roi_align", "ps_roi_pool"]),
}


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=["half", "fp32"])
@pytest.mark.parametrize("name", [name for name in CALLED if name not in NO_FAKE])
def test_result_dtypes_equal_those_of_torch_s_own_cuda_kernels(
    name: str, dtype: torch.dtype, emulated_outcomes: Any, cuda_outcomes: Any
) -> None:
    assert emulated_outcomes[name, dtype] == cuda_outcomes[name, dtype]


def test_promotion_of_mixed_inputs_equals_torch_s_own_cuda_kernels(real_cuda_autocast: Any) -> None:
    names = [name for name in CALLED if RULES[name] is Policy.PROMOTE]
    mixed = [(HALF, SINGLE), (SINGLE, HALF)]
    with real_cuda_autocast():
        expected = {n: [call(n, dtype, "cuda", first=first) for dtype, first in mixed] for n in names}
    with emulated_autocast():
        assert {n: [call(n, dtype, "cpu", first=first) for dtype, first in mixed] for n in names} == expected


FIXED = {
    Policy.LOWER_PRECISION: {HALF: HALF, SINGLE: HALF},
    Policy.FP32: {HALF: SINGLE, SINGLE: SINGLE},
    Policy.FP32_SET_OPT_DTYPE: {HALF: SINGLE, SINGLE: SINGLE},
    Policy.FP32_APPEND_DTYPE: {HALF: SINGLE, SINGLE: SINGLE},
    Policy.PROMOTE: {HALF: HALF, SINGLE: SINGLE},
    Policy.FP32_INPUT_DTYPE: {HALF: HALF, SINGLE: SINGLE},
}


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=["half", "fp32"])
@pytest.mark.parametrize("name", CALLED)
def test_result_dtypes_are_those_of_the_list(name: str, dtype: torch.dtype, emulated_outcomes: Any) -> None:
    floating = {found for found in emulated_outcomes[name, dtype] if found.is_floating_point}
    assert floating == (set() if name == "torchvision::nms" else {FIXED[RULES[name]][dtype]})


def test_low_precision_is_the_dtype_that_autocast_names() -> None:
    names = [name for name in CALLED if RULES[name] is Policy.LOWER_PRECISION]
    with emulated_autocast(torch.bfloat16):
        assert {d for name in names for d in call(name, SINGLE, "cpu")} == {torch.bfloat16}


def test_float64_is_never_touched() -> None:
    with emulated_autocast():
        for name in ("mm", "einsum", "exp", "sum", "norm.Scalar", "dot"):
            assert call(f"aten::{name}", DOUBLE, "cpu") == [DOUBLE]


def test_a_dtype_that_the_caller_names_is_kept() -> None:
    x = torch.ones(2, 3, dtype=HALF)
    with emulated_autocast():
        assert x.sum(dtype=HALF).dtype is HALF
        assert x.softmax(-1, HALF).dtype is HALF
        assert x.cumsum(0, dtype=DOUBLE).dtype is DOUBLE
        assert torch.ones(2, dtype=torch.int64).sum().dtype is torch.int64


def test_binary_cross_entropy_is_refused_with_the_way_out() -> None:
    p = torch.full((3,), 0.5)
    with emulated_autocast(), pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        torch.nn.BCELoss()(p, p)


def test_another_half_dtype_cannot_be_promoted() -> None:
    with emulated_autocast(), pytest.raises(RuntimeError, match="bfloat16"):
        torch.dot(torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=HALF))


CPU_ONLY = sorted(
    n
    for n in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    if n.startswith("aten::") and n not in RULES and n not in LIKE_CUDA_ON_CPU and n not in CUDNN_RECURRENT
)


def test_rules_that_only_the_cpu_has_do_nothing() -> None:
    h = torch.rand(1, 4, 4, 4).half()
    assert "aten::cat" in CPU_ONLY
    with emulated_autocast():
        assert torch.cat([h, h]).dtype is HALF
        assert torch.nn.functional.max_pool3d(h, 2).dtype is HALF
        assert torch.nn.functional.pad(h, (1, 1, 1, 1), mode="reflect").dtype is HALF
        assert torch.fft.rfft(h.float()).dtype is torch.complex64


def cpu_dtypes() -> list[torch.dtype]:
    h = torch.rand(2, 2).half()
    with torch.autocast("cpu", HALF):
        return [h.exp().dtype, h.softmax(-1).dtype, h.sum().dtype, torch.cat([h, h.float()]).dtype, (h @ h).dtype]


def test_torch_s_own_rules_are_back_after_the_context() -> None:
    before = cpu_dtypes()
    with cuda_autocast_rules():
        assert cpu_dtypes() == [SINGLE, SINGLE, SINGLE, SINGLE, HALF]
        with cuda_autocast_rules():
            pass
        assert cpu_dtypes() == [SINGLE, SINGLE, SINGLE, SINGLE, HALF]
    assert cpu_dtypes() == before != [SINGLE, SINGLE, SINGLE, SINGLE, HALF]


def test_nothing_changes_while_autocast_is_off() -> None:
    h = torch.rand(2, 2).half()
    with cuda_autocast_rules():
        assert h.exp().dtype is HALF
        with torch.autocast("cpu", HALF), torch.autocast("cpu", enabled=False):
            assert h.softmax(-1).dtype is HALF


def test_a_rule_that_the_table_lacks_is_named_in_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, "aten::exp")
    with pytest.warns(autocast.PrecisionWarning, match="aten::exp"), cuda_autocast_rules():
        pass

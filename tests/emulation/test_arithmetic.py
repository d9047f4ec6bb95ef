"""Half arithmetic: exact to one rounding, torch's own FP16 kernels held to the same bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.emulation import emulate
from autoprec.emulation.arithmetic import emulated_dtypes

HALF = torch.float16
SMALLEST_SUBNORMAL = 2.0**-24
LARGEST = 65504.0
ARITHMETIC = {"emulated": lambda: emulate(gpu_rules=False), "torch": nullcontext}


def ulp(x: torch.Tensor) -> torch.Tensor:
    """Return the distance between neighbouring FP16 values at `x` (float64)."""
    exponent = torch.frexp(x.abs().clamp(min=2.0**-14)).exponent - 1
    return torch.ldexp(torch.ones_like(x), exponent - 10)


def excess(value: torch.Tensor, reference: torch.Tensor, magnitude: torch.Tensor) -> float:
    """Return by how much `value` oversteps half an ulp of `reference` plus FP32's accumulation error, at most."""
    bound = ulp(reference) / 2 + 4 * 2.0**-24 * magnitude
    return float(((value.double() - reference).abs() - bound).max())


def halves(*shape: int, scale: float = 1.0, positive: bool = False, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return (x.abs() if positive else x).to(HALF)


PRODUCTS: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "mm": (torch.mm, [(33, 65), (65, 17)]),
    "addmm": (torch.addmm, [(17,), (33, 65), (65, 17)]),
    "bmm": (torch.bmm, [(3, 9, 65), (3, 65, 7)]),
    "baddbmm": (torch.baddbmm, [(3, 9, 7), (3, 9, 65), (3, 65, 7)]),
    "addbmm": (torch.addbmm, [(9, 7), (3, 9, 65), (3, 65, 7)]),
    "mv": (torch.mv, [(33, 65), (65,)]),
    "addmv": (torch.addmv, [(33,), (33, 65), (65,)]),
    "dot": (torch.dot, [(65,), (65,)]),
    "vdot": (torch.vdot, [(65,), (65,)]),
    "addr": (torch.addr, [(9, 7), (9,), (7,)]),
    "linear": (F.linear, [(5, 65), (7, 65), (7,)]),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), [(3, 9, 65), (3, 65, 7)]),
    "bilinear": (F.bilinear, [(5, 6), (5, 7), (3, 6, 7)]),
    "conv1d": (F.conv1d, [(2, 8, 20), (6, 8, 3), (6,)]),
    "conv2d": (F.conv2d, [(2, 8, 12, 12), (6, 8, 3, 3), (6,)]),
    "conv2d_strided": (lambda *a: F.conv2d(*a, stride=2, padding=1, dilation=2), [(2, 8, 12, 12), (6, 8, 3, 3)]),
    "conv2d_depthwise": (lambda *a: F.conv2d(*a, groups=8), [(2, 8, 12, 12), (8, 1, 3, 3), (8,)]),
    "conv3d": (F.conv3d, [(2, 4, 6, 6, 6), (6, 4, 3, 3, 3), (6,)]),
    "conv_tbc": (torch.conv_tbc, [(20, 2, 8), (3, 8, 6), (6,)]),
    "conv_transpose1d": (F.conv_transpose1d, [(2, 8, 10), (8, 6, 3), (6,)]),
    "conv_transpose2d": (lambda *a: F.conv_transpose2d(*a, stride=2), [(2, 8, 6, 6), (8, 6, 3, 3), (6,)]),
    "conv_transpose3d": (F.conv_transpose3d, [(2, 4, 4, 4, 4), (4, 6, 3, 3, 3), (6,)]),
}


def operands(name: str, *, scale: float, positive: bool) -> list[torch.Tensor]:
    """Draw operands whose product stays inside FP16's range, the second one scaled against the first."""
    first, *others = PRODUCTS[name][1]
    rest = [halves(*shape, scale=0.05, positive=positive, seed=i) for i, shape in enumerate(others, start=1)]
    return [halves(*first, scale=scale, positive=positive), *rest]


# torch's own FP16 CPU kernels round partial sums of these to half, so that they overstep the bound
ROUNDED_MORE_THAN_ONCE = (
    "addbmm",
    "addr",
    "bilinear",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
)


HELD = [(n, a) for n in PRODUCTS for a in ARITHMETIC if a == "emulated" or n not in ROUNDED_MORE_THAN_ONCE]


@pytest.mark.parametrize("scale", [1e-3, 1e-1, 1.0, 1e1, 1e2], ids=str)
@pytest.mark.parametrize(("name", "arithmetic"), HELD)
def test_products_are_within_one_rounding_of_float64(name: str, scale: float, arithmetic: str) -> None:
    function, _ = PRODUCTS[name]
    inputs = operands(name, scale=scale, positive=False)
    with ARITHMETIC[arithmetic]():
        value = function(*inputs)
    reference = function(*(x.double() for x in inputs))
    magnitude = function(*(x.double().abs() for x in inputs))
    assert value.dtype is HALF
    assert excess(value, reference, magnitude) <= 0


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_positive_operands_are_within_one_ulp(name: str) -> None:
    function, _ = PRODUCTS[name]
    inputs = operands(name, scale=1.0, positive=True)
    with emulate(gpu_rules=False):
        value = function(*inputs)
    reference = function(*(x.double() for x in inputs))
    assert bool(((value.double() - reference).abs() <= ulp(reference)).all())


def gradients(name: str, dtype: torch.dtype, inputs: list[torch.Tensor], seed: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
    PRODUCTS[name][0](*leaves).backward(seed.to(dtype))
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("name", PRODUCTS)
def test_gradients_of_products_are_within_one_ulp(name: str) -> None:
    inputs = operands(name, scale=1.0, positive=True)
    shape = PRODUCTS[name][0](*(x.double() for x in inputs)).shape
    seed = halves(*shape, positive=True, seed=9)
    with emulate(gpu_rules=False):
        values = gradients(name, HALF, inputs, seed)
    for value, reference in zip(values, gradients(name, torch.float64, inputs, seed), strict=True):
        assert value.dtype is HALF
        assert bool(((value.double() - reference).abs() <= ulp(reference)).all())


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_convolution_backward_leaves_out_what_needs_no_gradient(frozen: int) -> None:
    leaves = [x.requires_grad_(i != frozen) for i, x in enumerate(operands("conv2d", scale=1.0, positive=False))]
    with emulate(gpu_rules=False):
        F.conv2d(*leaves).sum().backward()
    assert [leaf.grad is None for leaf in leaves] == [i == frozen for i in range(3)]


@pytest.mark.parametrize("arithmetic", ARITHMETIC)
@pytest.mark.parametrize("product", [torch.mm, F.linear, lambda a, b: F.conv1d(a[None], b.T[..., None])[0]])
def test_overflow_subnormals_and_nan_equal_by_value(product: Any, arithmetic: str) -> None:
    def one(a: float, b: float) -> float:
        return product(torch.tensor([[a]], dtype=HALF), torch.tensor([[b]], dtype=HALF)).item()

    with ARITHMETIC[arithmetic]():
        assert one(LARGEST, 1.0) == LARGEST
        assert one(256.0, 256.0) == float("inf")
        assert one(-256.0, 256.0) == float("-inf")
        assert one(SMALLEST_SUBNORMAL, 1.0) == SMALLEST_SUBNORMAL
        assert one(2.0**-12, 2.0**-12) == SMALLEST_SUBNORMAL
        assert one(2.0**-14, 0.75) == 0.75 * 2.0**-14
        assert one(2.0**-13, 2.0**-12) == 0.0
        assert one(float("inf"), 0.0) != one(float("inf"), 0.0)
        assert one(float("nan"), 1.0) != one(float("nan"), 1.0)


def test_subnormals_survive_flushing_of_fp32_denormals() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        with emulate(gpu_rules=False):
            assert (torch.full((1, 1), SMALLEST_SUBNORMAL, dtype=HALF) @ torch.ones(1, 1, dtype=HALF)).item() != 0
    finally:
        torch.set_flush_denormal(False)


def test_a_sum_beyond_half_s_range_that_comes_back_does_not_overflow() -> None:
    row = torch.tensor([[60000.0, 60000.0, -60000.0]], dtype=HALF)
    with emulate(gpu_rules=False):
        assert (row @ torch.ones(3, 1, dtype=HALF)).item() == 60000.0


@pytest.mark.parametrize("name", ["addmm_", "baddbmm_", "addbmm_", "addmv_", "addr_"])
def test_in_place_products_equal_their_functional_form(name: str) -> None:
    first, *rest = operands(name[:-1], scale=1.0, positive=False)
    shape = getattr(torch, name[:-1])(first, *rest).shape
    first = first.expand(shape).clone()
    with emulate(gpu_rules=False):
        expected = getattr(torch, name[:-1])(first, *rest, alpha=0.5, beta=2)
        own = first.clone()
        assert getattr(own, name)(*rest, alpha=0.5, beta=2) is own
    assert torch.equal(own, expected)


def test_products_write_to_out_and_resize_it() -> None:
    a, b = operands("mm", scale=1.0, positive=False)
    out = torch.empty(0, dtype=HALF)
    with emulate(gpu_rules=False):
        assert torch.mm(a, b, out=out) is out
        assert torch.equal(out, torch.mm(a, b))


def test_a_product_whose_fp32_result_is_asked_for_is_not_rounded() -> None:
    a = torch.full((2, 3), 300.0, dtype=HALF)
    with emulate(gpu_rules=False):
        result = torch.mm(a, a.T, out_dtype=torch.float32)
    assert torch.equal(result, torch.full((2, 2), 270000.0))


def test_an_in_place_product_of_another_shape_is_refused() -> None:
    first, a, b = operands("addmm", scale=1.0, positive=False)
    with emulate(gpu_rules=False), pytest.raises(RuntimeError):
        first.addmm_(a, b)


class Calls(TorchDispatchMode):
    """Collect the dtypes in which products are computed below the emulation."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            self.dtypes.append(args[-1].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad_mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_composites_are_emulated_in_every_grad_mode(grad_mode: Callable[[], AbstractContextManager[None]]) -> None:
    layer = torch.nn.Linear(4, 4, dtype=HALF)
    with Calls() as calls, emulate(gpu_rules=False), grad_mode():
        layer(torch.ones(2, 4, dtype=HALF))
        torch.ones(2, 3, 4, dtype=HALF) @ torch.ones(2, 4, 3, dtype=HALF)
    assert calls.dtypes == [torch.float32, torch.float32]


def test_fp32_and_float64_are_left_alone() -> None:
    for dtype in (torch.float32, torch.float64):
        a = torch.randn(5, 6, dtype=dtype, requires_grad=True)
        b = torch.randn(6, 4, dtype=dtype)
        plain = torch.autograd.grad((a @ b).sum(), a)[0]
        with emulate(gpu_rules=False):
            assert torch.equal(torch.autograd.grad((a @ b).sum(), a)[0], plain)


def test_products_of_mixed_dtypes_are_still_refused() -> None:
    with emulate(gpu_rules=False):
        with pytest.raises(RuntimeError, match="dtype"):
            torch.mm(torch.ones(2, 2, dtype=HALF), torch.ones(2, 2))
        with pytest.raises(RuntimeError, match="type"):
            F.conv1d(torch.ones(1, 2, 4, dtype=HALF), torch.ones(2, 2, 1))


ATTENTION = {
    "plain": {},
    "causal": {"is_causal": True},
    "boolean_mask": {"attn_mask": torch.tensor([[True] * 5 + [False]] * 6)},
    "additive_mask": {"attn_mask": torch.linspace(-2, 2, 36).reshape(6, 6).to(HALF)},
    "scaled": {"scale": 0.3},
}


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_and_its_gradients_are_close_to_float64(case: str) -> None:
    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v = (halves(2, 3, 6, 8, seed=s).to(dtype).requires_grad_() for s in range(3))
        options = {n: o.to(dtype) if n == "attn_mask" and o.dtype is HALF else o for n, o in ATTENTION[case].items()}
        output = F.scaled_dot_product_attention(q, k, v, **options)
        return [output.detach(), *torch.autograd.grad(output, (q, k, v), halves(2, 3, 6, 8, seed=9).to(dtype))]

    with emulate(gpu_rules=False):
        values = run(HALF)
    for value, reference in zip(values, run(torch.float64), strict=True):
        assert value.dtype is HALF
        assert float((value.double() - reference).abs().max()) <= 2e-3


def test_half_layer_norm_keeps_its_statistics_in_fp32() -> None:
    x = (halves(64, 32) + 100).requires_grad_()
    weight, bias = torch.ones(32, dtype=HALF, requires_grad=True), torch.zeros(32, dtype=HALF, requires_grad=True)
    seed = halves(64, 32, positive=True, seed=3)
    with emulate(gpu_rules=False):
        output, mean, rstd = torch.native_layer_norm(x, [32], weight, bias, 1e-5)
        assert (output.dtype, mean.dtype, rstd.dtype) == (HALF, torch.float32, torch.float32)
        grads = torch.autograd.grad(output, (x, weight, bias), seed)
    doubles = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    expected = torch.autograd.grad(F.layer_norm(doubles[0], (32,), *doubles[1:]), doubles, seed.double())
    for value, reference in zip(grads, expected, strict=True):
        assert excess(value, reference, 64 * reference.abs().max().expand_as(reference)) <= 0


@pytest.mark.parametrize("running", [torch.float32, HALF], ids=["fp32", "half"])
def test_half_batch_norm_updates_its_running_statistics(running: torch.dtype) -> None:
    x = halves(8, 3, 4, 4) + 2
    mean, variance = torch.zeros(3, dtype=running), torch.ones(3, dtype=running)
    with emulate(gpu_rules=False):
        output = F.batch_norm(x, mean, variance, training=True)
    expected = x.double().mean((0, 2, 3)) * 0.1
    assert output.dtype is HALF
    torch.testing.assert_close(mean.double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "take",
    [F.embedding, lambda i, w: w[i], lambda i, w: w.index_select(0, i)],
    ids=["embedding", "index", "index_select"],
)
def test_gradients_of_rows_used_often_are_added_up_in_fp32(take: Any) -> None:
    weight = torch.zeros(2, 4, dtype=HALF, requires_grad=True)
    seed = halves(4096, 4, positive=True)
    with emulate(gpu_rules=False):
        take(torch.zeros(4096, dtype=torch.long), weight).backward(seed)
    reference = seed.double().sum(0)
    assert weight.grad is not None
    assert bool(((weight.grad[0].double() - reference).abs() <= ulp(reference)).all())


MISSING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "avg_pool3d": lambda x: F.avg_pool3d(x, 2),
    "local_response_norm": lambda x: F.local_response_norm(x[0], 2),
    "antialiased": lambda x: F.interpolate(x[0], scale_factor=0.5, mode="bilinear", antialias=True),
    "multi_margin": lambda x: F.multi_margin_loss(x.flatten(1), torch.zeros(2, dtype=torch.long)),
}


@pytest.mark.parametrize("name", MISSING)
def test_operators_that_only_a_gpu_has_in_half_work_forward_and_backward(name: str) -> None:
    def run(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        x = halves(2, 3, 4, 4, 4).to(dtype).requires_grad_()
        output = MISSING[name](x)
        return output.detach(), torch.autograd.grad(output.sum(), x)[0]

    with emulate(gpu_rules=False):
        values = run(HALF)
    for value, reference in zip(values, run(torch.float64), strict=True):
        torch.testing.assert_close(value.double(), reference, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("layer", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_in_half_follow_fp32(layer: str) -> None:
    torch.manual_seed(0)
    module = getattr(torch.nn, layer)(6, 5, bidirectional=True)
    x = torch.randn(4, 2, 6)
    expected = module(x)[0]
    with emulate(gpu_rules=False):
        value = module.half()(x.half())[0]
        value.float().sum().backward()
    assert value.dtype is HALF
    torch.testing.assert_close(value.float(), expected, rtol=0, atol=4e-3)


@pytest.fixture
def without_native_bf16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, probe, lambda: False, raising=False)
    emulated_dtypes.cache_clear()
    yield
    emulated_dtypes.cache_clear()


@pytest.mark.usefixtures("without_native_bf16")
def test_bf16_is_emulated_where_the_cpu_has_no_native_bf16() -> None:
    a, b = (halves(9, 33, seed=s).to(torch.bfloat16) for s in range(2))
    with Calls() as calls, emulate(gpu_rules=False):
        value = a @ b.T
    assert calls.dtypes == [torch.float32]
    assert torch.equal(value, (a.float() @ b.T.float()).to(torch.bfloat16))


def test_bf16_is_left_to_a_cpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    emulated_dtypes.cache_clear()
    a = torch.ones(4, 4, dtype=torch.bfloat16)
    with Calls() as calls, emulate(gpu_rules=False):
        a @ a
    emulated_dtypes.cache_clear()
    assert calls.dtypes == [torch.bfloat16]

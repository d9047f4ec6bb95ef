"""Reported situations with their right values: embeddings, losses, custom functions, FFTs, FP32 islands."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from apply_models import Calls
from torch import nn

from autoprec import Policy, apply_policy, emulate, remove_policy
from autoprec.apply.plan import resolve_plan
from autoprec.apply.structure import read_structure
from autoprec.policy import Precision
from autoprec.probes.dtypes import watch_dtypes

HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32


# C07: Embedding next to half layers


def test_c07_index_assignment_of_autocast_halves_fails_as_in_torch_and_passes_in_fp32() -> None:
    def assign(m: Any, ids: torch.Tensor) -> torch.Tensor:
        h = m.embedding(ids).clone()
        h[torch.tensor([True, False])] = m.linear(h)[:1]
        return h

    model = Calls(assign, embedding=nn.Embedding(4, 8), linear=nn.Linear(8, 8))
    ids = torch.tensor([1, 2])
    bare = model(ids)
    assert torch.equal(apply_policy(model, Policy(default="fp32"))(ids), bare)
    remove_policy(model)
    apply_policy(model, Policy(default="autocast"))
    with pytest.raises(RuntimeError, match="Index put requires the source and destination dtypes match"):
        model(ids)
    remove_policy(model)
    assert apply_policy(model, Policy(default="fp16"))(ids).dtype == FULL


# C08: losses


def test_c08_a_loss_after_the_model_is_fp32() -> None:
    model = apply_policy(nn.Sequential(nn.Identity()), Policy(default="fp16"))
    assert F.mse_loss(model(torch.full((4,), 300.0)), torch.zeros(4)).item() == 90000.0


LOSSES = {
    "functional": lambda m, x: F.mse_loss(x, torch.zeros_like(x)),
    "module": lambda m, x: m.loss(x, torch.zeros_like(x)),
    "helper": lambda m, x: helper(x),
    "in a part": lambda m, x: m.part(x),
    "with logits": lambda m, x: (helper(x), x)[0],
}


def helper(x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(x, torch.zeros_like(x))


class Part(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper(x)


class Losing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.MSELoss()
        self.part = Part()

    def forward(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        return LOSSES[kind](self, x) if kind != "functional" else F.mse_loss(x, torch.zeros_like(x))


@pytest.mark.parametrize("kind", ["functional", "module", "in a part"])
@pytest.mark.parametrize("precision", ["fp16", "autocast"])
def test_c08_a_loss_inside_the_forward_is_fp32(kind: str, precision: Any) -> None:
    model = apply_policy(Calls(lambda m, x: m.losing(x, kind), losing=Losing()), Policy(default=precision))
    assert model(torch.full((4,), 300.0)).item() == 90000.0
    assert model.eval()(torch.full((4,), 300.0)).item() == 90000.0


class Probable(nn.Module):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)
        self.loss = loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = torch.sigmoid(self.head(x))
        return self.loss(p, torch.ones_like(p)) if self.loss else F.binary_cross_entropy(p, torch.ones_like(p))


@pytest.mark.parametrize("loss", [nn.BCELoss(), None], ids=["BCELoss", "binary_cross_entropy"])
@pytest.mark.parametrize("precision", ["fp32", "autocast", "fp16"])
def test_c08_bce_on_probabilities_is_computed_in_fp32(loss: Any, precision: Any) -> None:
    torch.manual_seed(0)
    model = Probable(copy.copy(loss))
    batch = torch.randn(3, 4)
    bare = model(batch).item()
    assert apply_policy(model, Policy(default=precision))(batch).item() == pytest.approx(bare, rel=2e-3)


# C09: custom autograd functions


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


class Declared(Product):
    forward = staticmethod(torch.amp.custom_fwd(device_type="cpu", cast_inputs=FULL)(Product.forward))
    backward = staticmethod(torch.amp.custom_bwd(device_type="cpu")(Product.backward))


class Custom(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Linear(4, 4)
        self.w = nn.Parameter(torch.eye(4) * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(self.first(x), self.w)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_c09_a_custom_function_computes_in_its_module_and_its_gradient_is_right(precision: Any) -> None:
    torch.manual_seed(0)
    model, x = Custom(Product), torch.randn(3, 4)
    model(x).sum().backward()
    reference, model.w.grad = model.w.grad, None
    apply_policy(model, Policy(default=precision))(x).sum().backward()
    assert model.w.grad.dtype == FULL
    torch.testing.assert_close(model.w.grad, reference, rtol=1e-2, atol=1e-2)


def test_c09_under_autocast_a_plain_function_raises_and_a_declared_one_is_respected() -> None:
    model = apply_policy(Custom(Product), Policy(default="autocast"))
    with pytest.raises(RuntimeError, match="same dtype"):
        model(torch.randn(3, 4)).sum().backward()
    declared = apply_policy(Custom(Declared), Policy(default="autocast"))
    with watch_dtypes(declared) as log:
        declared(torch.randn(3, 4)).sum().backward()
    assert [o.inputs for o in log[""].operators if o.name in ("mm", "matmul")] == [{FULL}]
    assert declared.w.grad.dtype == FULL


# C10: FFT


@pytest.mark.parametrize("size", [192, 256])
@pytest.mark.parametrize("precision", ["autocast", "fp16"])
def test_c10_an_fp32_unit_around_an_fft_takes_every_size(size: int, precision: Any) -> None:
    model = Calls(
        lambda m, x: m.spectrum(m.conv(x)),
        conv=nn.Conv1d(1, 2, 3, padding=1),
        spectrum=Calls(lambda m, x: torch.fft.rfft(x).abs()),
    )
    apply_policy(model, Policy(default=precision, modules={"spectrum": "fp32"}))
    with watch_dtypes(model) as log:
        assert model(torch.randn(1, 1, size)).shape == (1, 2, size // 2 + 1)
    assert log["spectrum"].computed == {FULL}


# C13: FP32 islands


def test_c13_an_fp32_layer_after_a_half_one_computes_fp32() -> None:
    model = apply_policy(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.PReLU()),
        Policy(modules={"0": "fp16", "1": "fp32", "2": "fp16"}),
    )
    with watch_dtypes(model) as log:
        model(torch.randn(2, 4)).sum().backward()
    assert log["0"].computed == {HALF}
    assert log["1"].computed == {FULL}
    assert log["2"].computed == {HALF}


def test_c13_in_place_residuals_pass_in_every_mixture() -> None:
    def residual(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.first(x)
        y = m.second(x)
        y += x
        return y

    for first in ("fp32", "fp16", "autocast", "bf16"):
        for second in ("fp32", "fp16", "autocast", "bf16"):
            model = Calls(residual, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
            policy = Policy(default="autocast", modules={"first": first, "second": second})
            model = apply_policy(model, policy)
            model(torch.randn(2, 4)).sum().backward()
            assert model.second.weight.grad is not None


def test_c13_an_alternating_chain_trains_like_fp32() -> None:
    torch.manual_seed(0)
    chain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)))
    other = copy.deepcopy(chain)
    apply_policy(chain, Policy(default="fp32", modules={str(i): "fp16" for i in range(0, 10, 2)}))
    batch = torch.randn(16, 8)
    for model in (chain, other):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(chain(batch), other(batch), rtol=1e-2, atol=1e-3)


def test_c13_an_ignored_in_place_result_reaches_the_caller() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        m.act(x)
        return x

    model = apply_policy(Calls(forward, act=nn.ReLU(inplace=True)), Policy(default="fp32", modules={"act": "fp16"}))
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    output = model(x)
    assert output.tolist() == [0.0, 4.0]
    output.sum().backward()
    assert x.grad.tolist() == [0.0, 2.0]


@pytest.mark.parametrize("precision", ["autocast", "fp16", "bf16"])
def test_a_scripted_part_with_one_child_follows_its_parent(precision: Precision) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.only(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch.jit.script is deprecated, and people have it
                self.scripted = torch.jit.script(Inner())
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.scripted(x))

    torch.manual_seed(0)
    model, x = Outer(), torch.randn(3, 4)
    expected = model(x)
    apply_policy(model, Policy(default="fp32", dtype="bf16", modules={"head": precision}))
    assert torch.allclose(model(x), expected, atol=5e-2)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_loss_module_with_parts_computes_in_fp32_as_a_whole(precision: Precision) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 8)
            self.head = nn.AdaptiveLogSoftmaxWithLoss(8, 20, cutoffs=[4, 10], div_value=2.0)

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x), target).loss

    torch.manual_seed(0)
    model, x, target = Words(), torch.randn(16, 8), torch.arange(16)
    expected = model(x, target)
    apply_policy(model, Policy(default=precision))
    with watch_dtypes(model) as log, emulate():
        found = model(x, target)
    assert log["head.head"].inputs == log["head.tail.0.0"].inputs == {torch.float32}
    assert torch.allclose(found, expected, atol=2e-2)


def test_a_part_of_a_loss_module_that_a_rule_names_follows_it() -> None:
    loss = nn.AdaptiveLogSoftmaxWithLoss(8, 20, cutoffs=[4, 10], div_value=2.0)
    structure = read_structure(nn.ModuleDict({"head": loss}))
    plan = resolve_plan(structure, Policy(default="fp16", modules={"head.tail.0": "bf16"}))
    assert plan.precision("head.tail.0.1") == "bf16"
    assert plan.precision("head.tail.1.1") == plan.precision("head.head") == "fp32"

"""Quantities that a half module is handed reach whoever computes in FP32 inside it as they were: exact."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoprec
from autoprec.policy import Policy

HALVES = ("fp16", "bf16")
TIME = 998.39
"""BF16 has 4 between neighbours here, FP16 one half."""


class Seen(nn.Module):
    """Keeps what it was given, and gives it on."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.value = value.detach().clone()
        self.dtype = value.dtype
        return value * 1.0


class SinusoidalEmbedding(nn.Module):
    def forward(self, times: torch.Tensor) -> torch.Tensor:
        angles = times[:, None] * torch.exp(torch.arange(4, device=times.device) * -1.0)
        return torch.cat([angles.sin(), angles.cos()], dim=1)


class Denoiser(nn.Module):
    """The network of a diffusion model: noisy values and their time steps."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = SinusoidalEmbedding()
        self.project = nn.Linear(8, 8)
        self.body = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        self.embedded = self.emb(times)
        return self.body(x + self.project(self.embedded))


class Regression(nn.Module):
    """A loss inside the model's forward, as transformers' models and nanoGPT have it."""

    def __init__(self, *, has_module: bool = False, flat: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(8, 1)
        self.criterion = nn.L1Loss() if has_module else None
        self.flat = flat

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        output = self.body(x)
        if self.flat:
            output, targets = output.view(-1), targets.view(-1)
        return self.criterion(output, targets) if self.criterion is not None else F.l1_loss(output, targets)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("flat", [False, True], ids=["whole", "by view"])
@pytest.mark.parametrize("has_module", [False, True], ids=["function", "module"])
def test_a_target_that_half_cannot_hold_reaches_the_loss_inside(half, flat, has_module):
    torch.manual_seed(0)
    model = Regression(has_module=has_module, flat=flat)
    x, targets = torch.randn(4, 8), torch.full((4, 1), 70_001.0)
    expected = model(x, targets)
    autoprec.apply_policy(model, Policy(default=half))
    with autoprec.emulate():
        loss = model(x, targets)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=0.5)  # outputs of about 1, rounded


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("how", ["train", "no_grad", "inference"])
def test_a_time_step_reaches_its_fp32_embedding_unrounded(half, how):
    torch.manual_seed(0)
    model = Denoiser()
    x, times = torch.randn(2, 8), torch.tensor([TIME, 3.21])
    expected = model.emb(times)
    autoprec.apply_policy(model, Policy(default=half, modules={"emb": "fp32"}))
    mode = {"train": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[how]
    with autoprec.emulate(), mode():
        if how == "inference":
            times = times.clone()
        model(x, times)
    assert torch.equal(model.embedded, expected)


def test_the_rounded_time_step_alone_would_be_far_off():
    exact, rounded = (SinusoidalEmbedding()(torch.tensor([t])) for t in (TIME, float(torch.tensor(TIME).bfloat16())))
    assert (exact - rounded).abs().max() > 1.0


def test_an_argument_by_name_and_one_inside_a_container_reach_the_fp32_unit_too():
    class Boxes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.named, self.listed, self.body = Seen(), Seen(), nn.Linear(2, 2)

        def forward(self, x, *, boxes, targets):
            return self.body(x) + self.named(boxes).sum() + self.listed(targets[0]["boxes"]).sum()

    model = autoprec.apply_policy(Boxes(), Policy(default="bf16", modules={"named": "fp32", "listed": "fp32"}))
    boxes = torch.tensor([1023.7, 3.3])
    model(torch.randn(3, 2), boxes=boxes, targets=[{"boxes": boxes + 1}])
    assert torch.equal(model.named.value, boxes)
    assert torch.equal(model.listed.value, boxes + 1)


def test_a_slice_of_an_input_is_a_slice_of_the_original():
    class Coordinates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.body = Seen(), nn.Linear(2, 2)

        def forward(self, x):
            return self.body(x) + self.seen(x.t()[1:, ::2]).sum()

    model = autoprec.apply_policy(Coordinates(), Policy(default="bf16", modules={"seen": "fp32"}))
    x = torch.rand(6, 2) * 1000
    model(x)
    assert torch.equal(model.seen.value, x.t()[1:, ::2])


def test_code_between_the_units_of_an_fp32_parent_gets_the_original():
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)

        def forward(self, x):
            self.squared = x * x
            return self.body(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x)

    model = autoprec.apply_policy(Outer(), Policy(default="fp16", modules={"inner": "fp32"}))
    x = torch.full((2, 4), 300.1)
    with autoprec.emulate():
        model(x)
    assert torch.equal(model.inner.squared, x * x)


def test_a_changed_input_is_what_it_was_changed_to():
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.body = Seen(), nn.Linear(2, 2)

        def forward(self, x):
            x += 1.0
            return self.body(x) + self.seen(x).sum()

    model = autoprec.apply_policy(Shifted(), Policy(default="bf16", modules={"seen": "fp32"}))
    x = torch.full((2, 2), 300.1)
    model(x)
    assert torch.equal(model.seen.value, (torch.full((2, 2), 300.1).bfloat16() + 1).float())
    assert torch.equal(x, model.seen.value)


def test_what_an_fp32_unit_writes_into_its_input_reaches_the_caller_exactly_and_the_half_code():
    class Clamp(nn.Module):
        def forward(self, x):
            return x.clamp_(max=300.1)

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.clamp, self.body = Clamp(), nn.Linear(2, 2)

        def forward(self, x):
            self.clamp(x)
            self.inside = x.detach().clone()
            return self.body(x)

    model = autoprec.apply_policy(Parent(), Policy(default="bf16", modules={"clamp": "fp32"}))
    x = torch.full((2, 2), 1000.0)
    model(x)
    assert torch.equal(x, torch.full((2, 2), 300.1))
    assert torch.equal(model.inside, torch.full((2, 2), 300.1).bfloat16())


def test_an_input_that_the_model_hands_back_comes_back_as_it_was():
    class Handing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(2, 2)

        def forward(self, x, y):
            return self.body(x), y

    model = autoprec.apply_policy(Handing(), Policy(default="bf16"))
    y = torch.tensor([1023.7])
    assert torch.equal(model(torch.randn(3, 2), y)[1], y)


@pytest.mark.parametrize("outer", [*HALVES, "fp32"])
def test_regions_in_regions_hand_the_original_through(outer):
    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.body = SinusoidalEmbedding(), nn.Linear(8, 2)

        def forward(self, times):
            self.embedded = self.emb(times)
            return self.body(self.embedded)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.middle, self.body = Middle(), nn.Linear(2, 2)

        def forward(self, times):
            return self.body(self.middle(times))

    model = Outer()
    times = torch.tensor([TIME, 1.0])
    policy = Policy(default=outer, modules={"middle": "bf16", "middle.emb": "fp32"})
    autoprec.apply_policy(model, policy)
    with autoprec.emulate():
        model(times)
    assert torch.equal(model.middle.embedded, SinusoidalEmbedding()(times))


def test_a_sequence_hands_its_input_to_a_first_module_in_fp32():
    model = nn.Sequential(Seen(), nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    autoprec.apply_policy(model, Policy(default="bf16", modules={"0": "fp32"}))
    x = torch.tensor([[1023.7, 3.3]])
    model(x)
    assert torch.equal(model[0].value, x)


def test_an_activation_stays_what_the_half_unit_gives():
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(4, 4), nn.Sequential(Seen())

        def forward(self, x):
            return self.block(self.first(x))

    model = autoprec.apply_policy(Norm(), Policy(default="bf16", modules={"block": "fp32"}))
    model(torch.randn(3, 4))
    assert torch.equal(model.block[0].value, model.block[0].value.bfloat16().float())


def test_coordinates_with_gradients_get_theirs_through_the_original():
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.body = SinusoidalEmbedding(), nn.Linear(8, 1)

        def forward(self, times):
            return self.body(self.emb(times))

    torch.manual_seed(0)
    model = Field()
    times = torch.tensor([TIME, 2.0], requires_grad=True)
    (expected,) = torch.autograd.grad(model(times).sum(), times)
    autoprec.apply_policy(model, Policy(default="bf16", modules={"emb": "fp32"}))
    (found,) = torch.autograd.grad(model(times).sum(), times)
    assert torch.allclose(found, expected, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("kind", ["module", "reentrant", "non-reentrant"])
def test_a_recomputation_computes_with_the_original_again(kind):
    seen: list[torch.Tensor] = []

    class Embedding(SinusoidalEmbedding):
        def forward(self, times):
            seen.append(times.detach().clone())
            return super().forward(times)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.project, self.body = Embedding(), nn.Linear(8, 8), nn.Linear(8, 8)

        def inside(self, x, times):
            return self.body(x + self.project(self.emb(times)))

        def forward(self, x, times):
            if kind == "module" or not torch.is_grad_enabled():
                return self.inside(x, times)
            return checkpoint(self.inside, x, times, use_reentrant=kind == "reentrant")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(8, 8), Block()

        def forward(self, x, times):
            return self.block(self.first(x), times)

    torch.manual_seed(0)
    model = Model()
    if kind == "module":
        autoprec.apply.checkpoint_modules(model, ["block"])
    autoprec.apply_policy(model, Policy(default="bf16", modules={"block.emb": "fp32"}))
    times = torch.tensor([TIME, 3.21])
    model(torch.randn(2, 8), times).sum().backward()
    assert len(seen) == 2
    assert all(torch.equal(each, times) for each in seen)


def test_the_original_of_a_cast_is_let_go_with_it():
    from autoprec.apply import originals

    model = autoprec.apply_policy(Denoiser(), Policy(default="bf16", modules={"emb": "fp32"}))
    loss = model(torch.randn(2, 8), torch.tensor([TIME, 1.0])).sum()
    loss.backward()
    del loss
    model.embedded = None
    assert originals._used == {}
    assert originals.CASTS.known == ()


@pytest.mark.parametrize("half", HALVES)
def test_a_compiled_model_computes_with_the_original_too(half):
    torch.manual_seed(0)
    model = Denoiser()
    x, times = torch.randn(2, 8), torch.tensor([TIME, 3.21])
    autoprec.apply_policy(model, Policy(default=half, modules={"emb": "fp32"}))
    with torch.no_grad():
        expected = model(x, times)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x, times), expected)


def test_a_compiled_model_takes_a_changed_input_as_it_is():
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.body = SinusoidalEmbedding(), nn.Linear(8, 2)

        def forward(self, times):
            times += 8.0
            return self.body(self.emb(times))

    model = autoprec.apply_policy(Shifted(), Policy(default="bf16", modules={"emb": "fp32"}))
    with torch.no_grad():
        expected = model(torch.tensor([TIME, 3.21]))
        assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(torch.tensor([TIME, 3.21])), expected)

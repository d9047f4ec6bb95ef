"""Reported situations with their right values: norms, parametrised layers, what a forward writes to, masters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from apply_models import Calls
from torch import nn
from torch.nn.utils import parametrizations

from autoprec import Policy, apply_policy, emulate, remove_policy
from autoprec.errors import ApplyError, PrecisionWarning
from autoprec.probes.dtypes import watch_dtypes

HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32
HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32


# C14: normalised and parametrised layers

NORMS = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(4),
    "BatchNorm without statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "InstanceNorm": lambda: nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Upsample(3), nn.InstanceNorm1d(4, affine=True)),
    "RMSNorm": lambda: nn.RMSNorm(4),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "old spectral_norm": lambda: torch.nn.utils.spectral_norm(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS.keys())
@pytest.mark.parametrize("precision", ["fp16", "bf16", "autocast"])
def test_c14_parameters_and_statistics_stay_fp32_and_finite(make: Any, precision: Any) -> None:
    torch.manual_seed(0)
    part = make()
    if isinstance(part, nn.SyncBatchNorm):
        part.eval()
    model = apply_policy(Calls(lambda m, x: m.part(x), part=part), Policy(default="fp32", modules={"part": precision}))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.randn(6, 4) * 1e3).sum() * 1e-3).backward()
        optimizer.step()
    tensors = [*model.parameters(), *model.buffers()]
    assert all(t.dtype == FULL and t.isfinite().all() for t in tensors if t.is_floating_point())
    assert all(p.grad is not None and p.grad.dtype == FULL for p in model.parameters())


def test_c14_batch_norm_statistics_are_those_of_the_half_input_in_fp32() -> None:
    batch = torch.randn(64, 4) * 1e4
    plain, under = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    plain(batch.half().float())
    apply_policy(nn.Sequential(under), Policy(default="fp16"))(batch)
    torch.testing.assert_close(under.running_mean, plain.running_mean, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(under.running_var, plain.running_var, rtol=1e-5, atol=1e-3)


class Counting(nn.Module):
    """Statistics of the user's own, written in several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.tensor([100_000.0]))
        self.register_buffer("read", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "in place":
            self.seen.add_(1)
        elif self.how == "assigned":
            self.seen = self.seen + 1
        elif self.how == "augmented":
            self.seen += 1
        elif self.how == "item":
            self.seen[0] = self.seen[0] + 1
        elif self.how == "alias":
            seen = self.seen.data
            seen.add_(1)
        elif self.how == "helper":
            add_one(self.seen)
        elif self.how == "out":
            torch.add(self.seen, 1, out=self.seen)
        elif self.how == "named":
            self.named("seen")
        return x * self.read

    def named(self, name: str) -> None:
        getattr(self, "seen").add_(1)  # noqa: B009


def add_one(tensor: torch.Tensor) -> None:
    tensor.add_(1)


@pytest.mark.parametrize("how", ["in place", "assigned", "augmented", "item", "alias", "helper", "out", "named"])
def test_c14_written_buffers_stay_fp32_and_exact_and_read_ones_are_cast(how: str) -> None:
    model = apply_policy(nn.Sequential(Counting(how)), Policy(default="fp16"))
    for _ in range(3):
        with watch_dtypes(model) as log:
            model(torch.ones(2, 4))
    assert model[0].seen.dtype == FULL
    assert model[0].seen.tolist() == [100_003.0]
    products = [operator for operator in log["0"].operators if operator.name == "mul"]
    assert [operator.inputs for operator in products] == [{HALF}]


def test_c14_a_write_that_cannot_be_read_from_the_code_is_kept_and_told() -> None:
    write = eval("lambda tensor: tensor.add_(1)")

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.tensor([10.0, 10_000.5]))
            self.writers = [write]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.writers[0](self.seen[:1])
            return x

    model = apply_policy(nn.Sequential(Hidden()), Policy(default="fp16"))
    with pytest.warns(PrecisionWarning, match="writes to its buffer 'seen'"):
        model(torch.ones(1))
    model(torch.ones(1))
    assert model[0].seen.tolist() == [12.0, 10_000.5]


class Standardized(nn.Linear):
    """Weight standardisation: what a batch norm takes as its input is not written to."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.weight.reshape(1, 4, -1)
        weight = F.batch_norm(rows, None, None, weight=self.gain * 0.5, training=True).reshape_as(self.weight)
        return F.linear(x, weight, self.bias)


def test_c14_a_weight_that_is_standardised_by_a_batch_norm_is_half_like_its_gain() -> None:
    model = apply_policy(nn.Sequential(Standardized()), Policy(default="fp16"))
    with emulate(), watch_dtypes(model) as log:
        model(torch.randn(2, 4)).sum().backward()
    norms = [operator for operator in log["0"].operators if "batch_norm" in operator.name]
    assert norms
    assert all(operator.inputs == {HALF} for operator in norms)
    assert model[0].gain.grad is not None


# Masters (C29), memory format (C42), frozen parts


def test_c29_half_masters_are_listed_or_lifted_and_frozen_halves_may_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4).half(), nn.Linear(4, 4), nn.Linear(4, 4).bfloat16().requires_grad_(False))
    with pytest.raises(ApplyError, match=r"2 trainable parameters are not float32.*0\.weight, 0\.bias"):
        apply_policy(model, Policy())
    assert model[0].weight.dtype == HALF
    for default in ("autocast", "fp32", "fp16"):
        apply_policy(model, Policy(default=default), lift_half_parameters=True)
        assert [p.dtype for p in model.parameters()] == [FULL] * 4 + [BFLOAT] * 2
        model(torch.randn(2, 4)).sum().backward()
        assert model[0].weight.grad.dtype == FULL
        assert [p.requires_grad for p in model.parameters()] == [True] * 4 + [False] * 2
        remove_policy(model)


# Parameters that a forward writes to, and gradients that no cast has


class Renormalised(nn.Module):
    """As in models of EEG, CLIP and flows: the forward writes to its own parameters."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.scale = nn.Parameter(torch.tensor([7.0, 1.0009765625 + 2**-20]))
        self.linear = nn.Linear(2, 2)
        self.count = torch.tensor([1000.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.how == "data":
            self.scale.data.clamp_(0, 4.6052)
        elif self.how == "method":
            self.clamp()
        elif self.how == "assigned data":
            self.scale.data = self.scale.data.clamp(0, 4.6052)
        return self.linear(x) * self.scale

    def clamp(self) -> None:
        with torch.no_grad():
            self.scale.clamp_(0, 4.6052)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "autocast"])
@pytest.mark.parametrize("how", ["data", "method", "assigned data"])
def test_a_parameter_that_the_forward_writes_to_stays_fp32_and_exact(how: str, precision: Any) -> None:
    model = apply_policy(Renormalised(how), Policy(default=precision, dtype="bf16"))
    with watch_dtypes(model) as log:
        model(torch.ones(1, 2)).sum().backward()
    assert model.scale.tolist() == [torch.tensor(4.6052).item(), 1.0009765625 + 2**-20]
    assert log["linear"].computed == {HALF if precision == "fp16" else BFLOAT}
    assert model.count.tolist() == [1001.0]
    if how == "method" and precision != "fp16":
        torch._dynamo.reset()
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 2))
        assert model.count.tolist() == [1002.0]
        assert model.scale.dtype == FULL


@pytest.mark.parametrize("bag", [False, True])
@pytest.mark.parametrize("settings", [{"sparse": True}, {"max_norm": 0.5}], ids=["sparse", "max_norm"])
def test_embeddings_with_sparse_gradients_or_a_largest_norm_in_half(settings: dict[str, Any], bag: bool) -> None:
    table = (nn.EmbeddingBag if bag else nn.Embedding)(4, 8, **settings)
    model = apply_policy(nn.Sequential(table, nn.Linear(8, 2)), Policy(default="bf16"))
    model(torch.tensor([[0, 1]])).sum().backward()
    assert table.weight.grad.is_sparse == ("sparse" in settings)
    assert table.weight.grad.dtype == FULL
    if "max_norm" in settings:
        assert table.weight[:2].norm(dim=1).tolist() == pytest.approx([0.5, 0.5], abs=1e-6)
        assert (table.weight[2:].norm(dim=1) > 0.5).all()


class Normalised(nn.Module):
    """Spectral norm as older GAN code has it: it writes to parameters of another module under computed names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.u = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = getattr(self.inner, "u")  # noqa: B009
        u.data = u.data * 2
        return self.inner.forward(x) * u


def test_a_hidden_write_to_a_parameter_is_refused_and_lost_nowhere() -> None:
    model = apply_policy(nn.Sequential(Normalised()), Policy(default="bf16"))
    with pytest.raises(ApplyError, match="wrote to the parameter 'u' of Linear, which has a copy in bfloat16"):
        model(torch.ones(1, 2))
    assert remove_policy(model)[0].inner.u.tolist() == [1.0, 1.0]
    apply_policy(model, Policy(default="bf16", modules={"0": "fp32"}))(torch.ones(1, 2))
    assert model[0].inner.u.tolist() == [2.0, 2.0]


def test_a_write_in_place_to_a_plain_tensor_is_carried_over() -> None:
    def count(module: Any, x: torch.Tensor) -> torch.Tensor:
        module.count.add_(1)
        return x * module.count

    model = Calls(count)
    model.count = torch.tensor([3.0, 1000.0])
    apply_policy(model, Policy(default="bf16"))
    with pytest.warns(PrecisionWarning, match="writes to its tensor 'count'"):
        model(torch.ones(2))
    model(torch.ones(2))
    assert model.count.tolist() == [5.0, 1001.0]  # 1001 rounds to 1000 in bf16: the first write was lost, and told


def test_a_product_with_a_parameter_kept_in_fp32_and_a_module_that_came_later_are_explained() -> None:
    class Clipped(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data.clamp_(-1, 1)
            return super().forward(x)

    model = apply_policy(nn.Sequential(Clipped(4, 4)), Policy(default="bf16"))
    with pytest.raises(RuntimeError, match="same dtype") as raised:
        model(torch.ones(1, 4))
    assert "Clipped keeps weight in FP32" in raised.value.__notes__[0]
    model = apply_policy(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Policy(default="bf16"))
    model[1] = nn.Linear(4, 2)
    with pytest.raises(RuntimeError, match="same dtype") as raised:
        model(torch.ones(1, 4))
    assert (
        "added or replaced after the policy was applied and follow none of its rules: 1;" in raised.value.__notes__[0]
    )

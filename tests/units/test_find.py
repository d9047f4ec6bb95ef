"""A dry run finds the units of models of many shapes, and leaves no trace."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from autoprec.apply import apply_policy
from autoprec.emulation import emulate
from autoprec.errors import ApplyError
from autoprec.policy import Policy
from autoprec.units import Unit, Units, find_units


def _units(model: nn.Module, *inputs: Any) -> Units:
    return find_units(model, lambda m: m(*inputs))


def _by_name(units: Units) -> dict[str, Unit]:
    return {unit.name: unit for unit in units}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.tied = self.l

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.l(x))


class TiedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(ids)))


class DtypeBound(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return gradient.float() @ w.t(), x.t() @ gradient


class UsesFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return DtypeBound.apply(x, self.weight)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).masked_fill(x > 0, -1e9).softmax(-1)


class Spectrum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x).abs()


class EmbeddingBesideLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 8)
        self.linear = nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(ids).clone()
        h[ids > 1] = self.linear(x)[ids > 1]
        return h


def test_units_of_a_resnet_come_in_call_order_with_their_counts() -> None:
    units = _units(torchvision.models.resnet18(num_classes=4), torch.randn(2, 3, 32, 32))
    names = [unit.name for unit in units]
    assert names[:4] == ["conv1", "bn1", "relu", "maxpool"]
    assert names[-2:] == ["avgpool", "fc"]
    assert [unit.order for unit in units] == list(range(len(units)))
    assert _by_name(units)["layer1.0.relu"].num_calls == 2
    assert len(units.calls) == sum(unit.num_calls for unit in units)
    assert all(unit.choices == ("fp32", "autocast", "fp16", "bf16") for unit in units)


def test_attention_is_one_unit_and_its_projection_is_governed() -> None:
    vit = torchvision.models.VisionTransformer(32, 16, 2, 2, 32, 64)
    units = _units(vit, torch.randn(1, 3, 32, 32))
    assert "encoder.layers.encoder_layer_0.self_attention" in _by_name(units)
    attention = "encoder.layers.encoder_layer_1.self_attention"
    assert units.governed[f"{attention}.out_proj"] == attention
    with pytest.raises(ApplyError, match=r"out_proj.*is never called.*self_attention"):
        units.check(Policy(modules={f"{attention}.out_proj": "fp16"}))


def test_a_layer_that_is_owned_but_never_called_is_governed_by_its_parent() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.out = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(nn.functional.linear(x, self.inner.weight))

    units = _units(Functional(), torch.randn(2, 4))
    assert [unit.name for unit in units] == ["out"]
    assert units.governed == {"inner": ""}


def test_one_object_under_two_names_is_one_unit_with_an_alias() -> None:
    units = _units(Tied(), torch.randn(1, 4))
    assert [(unit.name, unit.aliases, unit.num_calls) for unit in units] == [("l", ("tied",), 2)]


def test_units_that_share_a_weight_know_each_other() -> None:
    units = _by_name(_units(TiedWeight(), torch.tensor([[0, 3]])))
    assert units["embedding"].tied == ("head",)
    assert units["head"].tied == ("embedding",)
    assert units["norm"].tied == ()


class Registered(nn.Module):
    """As model libraries tie: the head's bias is held by its parent too, the table by a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(4, 4)
        self.encoder = nn.ModuleDict({"embed": nn.Embedding(4, 4), "linear": nn.Linear(4, 4)})
        self.encoder["embed"].weight = self.shared.weight
        self.bias = self.encoder["linear"].bias

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.encoder["linear"](self.encoder["embed"](ids))


def test_a_layer_that_holds_a_units_weight_and_is_never_called_is_tied_to_it() -> None:
    units = {unit.name: unit for unit in find_units(Registered(), lambda m: m(torch.tensor([1])))}
    assert units["encoder.embed"].tied == ("shared",)
    assert units["encoder.linear"].tied == ()


def test_a_module_may_hold_a_weight_of_its_own_parts_in_another_precision() -> None:
    model = Registered()
    with pytest.raises(ApplyError, match=r"'shared\.weight' \(autocast\) and 'encoder\.embed\.weight' \(bf16\)"):
        apply_policy(model, Policy(modules={"encoder.embed": "bf16"}))
    apply_policy(model, Policy(modules={"encoder.embed": "bf16", "shared": "bf16", "encoder.linear": "bf16"}))
    with emulate():
        model(torch.tensor([1])).sum().backward()
    assert model.bias.grad.tolist() == [1.0] * 4


def test_a_custom_function_that_needs_fp32_takes_the_other_precisions_away_and_is_named() -> None:
    units = _by_name(_units(nn.Sequential(nn.Linear(4, 4), UsesFunction()), torch.randn(2, 4)))
    assert units["0"].choices == ("fp32", "autocast", "fp16", "bf16")
    assert "autocast" not in units["1"].choices
    assert "DtypeBound" in units["1"].reasons["autocast"]


def test_a_function_that_fails_in_backward_takes_the_choice_away() -> None:
    units = _by_name(_units(nn.Sequential(nn.Linear(4, 4), UsesFunction()), torch.randn(2, 4)))
    assert "fp16" not in units["1"].choices
    assert "dtype" in units["1"].reasons["fp16"]


def test_an_fft_keeps_its_module_in_fp32() -> None:
    units = _by_name(_units(nn.Sequential(nn.Conv1d(1, 1, 1), Spectrum()), torch.randn(2, 1, 192)))
    assert units["1"].choices == ("fp32",)
    assert units["0"].choices == ("fp32", "autocast", "fp16", "bf16")


def test_a_mask_that_overflows_in_half_is_found_in_the_code_between_the_units() -> None:
    units = _units(Masked(), torch.randn(2, 4))
    assert "overflow" in units.composites[""]["fp16"]
    assert "overflow" in units.composites[""]["autocast"]
    assert "bf16" not in units.composites[""]


def test_index_assignment_between_dtypes_is_found_in_the_code_between_the_units() -> None:
    units = _units(EmbeddingBesideLinear(), torch.tensor([0, 1, 2, 3]), torch.randn(4, 8))
    assert "Index put" in units.composites[""]["autocast"]


def test_a_dry_run_leaves_statistics_gradients_and_the_random_state_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model(torch.randn(8, 4)).sum().backward()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = (torch.rand(1).item(), random.random(), np.random.rand())
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    _units(model, torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(a is b for a, b in zip(gradients, (p.grad for p in model.parameters()), strict=True))
    assert not any("forward" in module.__dict__ or module._forward_pre_hooks for module in model.modules())


def test_a_dry_run_leaves_parameters_that_the_forward_writes_to() -> None:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 4, max_norm=0.1)
            self.scale = nn.Parameter(torch.tensor(9.0))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            self.scale.data.clamp_(max=1.0)
            return self.table(ids) * self.scale

    model = Clamped()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    units = find_units(model, lambda m: m(torch.arange(4)))
    assert units.units[0].choices == ("fp32", "autocast", "fp16", "bf16")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_modules_get_their_shapes() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Linear(4, 2))
    units = _units(model, torch.randn(3, 5))
    assert [unit.num_parameters for unit in units] == [24, 8, 0, 10]
    assert torch.equal(model[1].running_mean, torch.zeros(4))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_is_one_unit(kind: type[nn.RNNBase]) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = kind(4, 6, bidirectional=True)
            self.head = nn.Linear(12, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.recurrent(x)[0])

    units = _by_name(_units(Tagger(), torch.randn(5, 2, 4)))
    assert list(units) == ["recurrent", "head"]
    assert "fp16" in units["recurrent"].choices


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
def test_scripted_parts_are_single_units_that_refuse_half() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    units = _by_name(_units(nn.Sequential(nn.Linear(4, 4), scripted), torch.randn(2, 4)))
    assert list(units) == ["0", "1"]
    assert "TorchScript" in units["1"].reasons["fp16"]


def test_parts_that_are_called_without_the_whole_are_units() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maker = nn.Sequential(nn.Linear(2, 4), nn.ReLU())
            self.critic = nn.Linear(4, 1)

    found = find_units(Pair(), lambda nets: nets.critic(nets.maker(torch.randn(3, 2))))  # type: ignore[operator]
    assert [unit.name for unit in found] == ["maker.0", "maker.1", "critic"]
    assert all("fp16" in unit.choices for unit in found)
    assert found.governed == {}


def test_a_run_that_never_calls_the_model_says_so() -> None:
    with pytest.raises(ApplyError, match="never called the model"):
        find_units(nn.Linear(2, 2), lambda model: None)


def test_an_error_of_the_users_own_comes_through_and_leaves_no_hooks() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        _units(model, torch.randn(2, 3))
    assert not model._forward_pre_hooks

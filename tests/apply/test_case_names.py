"""Reported situations with their right values: modules owned and never called, names, copies, lazy modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from apply_models import Calls
from torch import nn

from autoprec import Policy, apply_policy, remove_policy
from autoprec.apply.state import num_regions_entered, num_weight_casts
from autoprec.errors import ApplyError, PrecisionWarning
from autoprec.probes.dtypes import watch_dtypes

HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32
HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32


# C01: layers that are owned but never called


@pytest.mark.parametrize("precision", ["fp16", "bf16", "autocast", "fp32"])
@pytest.mark.parametrize("training", [True, False])
def test_c01_attention_computes_as_a_whole_in_its_precision(precision: Any, training: bool) -> None:
    model = Calls(lambda m, x: m.attention(x, x, x)[0], attention=nn.MultiheadAttention(8, 2, batch_first=True))
    apply_policy(model.train(training), Policy(default="fp32", modules={"attention": precision}))
    products = {"mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_dot_product_flash_attention_for_cpu"}
    with torch.set_grad_enabled(training), watch_dtypes(model) as log:
        assert model(torch.randn(2, 3, 8)).dtype == FULL
    heavy = [operator for operator in log["attention"].operators if operator.name in products]
    expected = {"fp16": HALF, "bf16": BFLOAT, "autocast": HALF, "fp32": FULL}[precision]
    assert heavy
    assert all(operator.inputs == {expected} for operator in heavy)


def test_c01_a_part_of_attention_has_no_precision_of_its_own() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    with pytest.raises(
        ApplyError, match=r"'attention\.out_proj' is computed by 'attention' .* name 'attention' instead"
    ):
        apply_policy(model, Policy(modules={"attention.out_proj": "fp32"}))


def test_c01_a_layer_that_is_read_or_called_by_forward_computes_in_its_parents_half() -> None:
    model = Calls(
        lambda m, x: F.linear(m.called.forward(x), m.read.weight, m.several[0]),
        called=nn.Linear(4, 4),
        read=nn.Linear(4, 4),
        several=nn.ParameterList([torch.zeros(4)]),
    )
    apply_policy(model, Policy(default="fp16"))
    with watch_dtypes(model) as log:
        model(torch.randn(2, 4)).sum().backward()
    assert log.below("") == {HALF}
    assert model.several[0].grad.tolist() == [2.0, 2.0, 2.0, 2.0]
    assert model.read.weight.grad.dtype == FULL


# C04: one module under two names


def two_names() -> nn.Module:
    layer = nn.Linear(4, 4)
    return Calls(lambda m, x: m.tied(m.l(x)), l=layer, tied=layer)


def test_c04_one_module_under_two_names_takes_one_precision() -> None:
    model = two_names()
    assert len(model.state_dict()) == 4
    with pytest.raises(ApplyError, match=r"'l' \(fp16\) and 'tied' \(fp32\) are one module"):
        apply_policy(model, Policy(modules={"l": "fp16", "tied": "fp32"}))
    apply_policy(model, Policy(default="fp32", modules={"tied": "fp16"}))
    with watch_dtypes(model) as log:
        model(torch.ones(1, 4))
    assert log["l"].num_calls == 2
    assert log["l"].computed == {HALF}
    assert num_weight_casts() == 2
    assert num_regions_entered() == 3
    assert all("forward" not in module.__dict__ for module in remove_policy(model).modules())


def test_c04_tied_weights_take_one_precision() -> None:
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    with pytest.raises(ApplyError, match=r"'0\.weight' \(fp32\) and '1\.weight' \(fp16\) are one tied weight"):
        apply_policy(model, Policy(default="fp32", modules={"1": "fp16"}))
    apply_policy(model, Policy(default="fp16"))
    model(torch.tensor([1])).sum().backward()
    assert num_weight_casts() == 1


# C16: names


def test_c16_prefixes_of_wrappers_are_seen_through() -> None:
    for prefix in ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        apply_policy(model, Policy(default="fp32", modules={f"{prefix}0": "fp16"}))
        with watch_dtypes(model) as log:
            model(torch.ones(1, 2))
        assert (log["0"].computed, log["1"].computed) == ({HALF}, {FULL})


def test_c16_wrapped_models_take_the_names_of_the_bare_one() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for wrapped in (torch.compile(net, backend="eager"), nn.DataParallel(net)):
        apply_policy(wrapped, Policy(default="fp32", modules={"0": "fp16", "module.1": "fp16"}))
        assert "forward" in net[0].__dict__
        remove_policy(wrapped)
        assert "forward" not in net[0].__dict__


def test_c16_rules_that_match_nothing_are_listed_with_the_nearest_name() -> None:
    model = nn.ModuleDict({"layer1": nn.Linear(2, 2)})
    with pytest.raises(
        ApplyError, match=r"2 of the policy's rules match no module.*'layer9'; nearest: layer1, 'head\.\*'"
    ):
        apply_policy(model, Policy(modules={"layer9": "fp16", "head.*": "fp32"}))
    with pytest.warns(PrecisionWarning, match="match no module"):
        apply_policy(model, Policy(modules={"layer9": "fp16"}), strict=False)


# C18: copies


def test_c18_a_deep_copy_runs_its_own_weights() -> None:
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data.fill_(1.0)
    apply_policy(layer, Policy(default="fp16"))
    copied = copy.deepcopy(layer)
    copied.weight.data.fill_(9.0)
    assert copied(torch.ones(1, 2)).item() == 18.0
    assert layer(torch.ones(1, 2)).item() == 2.0


def test_c18_an_averaged_model_follows() -> None:
    model = apply_policy(nn.Linear(2, 1, bias=False), Policy(default="fp16"))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    model.weight.data.fill_(3.0)
    averaged.update_parameters(model)
    assert averaged(torch.ones(1, 2)).item() == 6.0


# C20: lazy modules


def test_c20_lazy_modules_take_a_policy_before_their_first_forward() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2), nn.LazyBatchNorm1d())
    apply_policy(model, Policy(default="fp32", modules={"0": "fp16", "3": "bf16"}))
    for _ in range(2):
        with watch_dtypes(model) as log:
            model(torch.randn(3, 8)).sum().backward()
        assert HALF in log["0"].computed
    assert log["0"].computed == {HALF}
    assert type(model[0]) is nn.Linear
    assert all(p.dtype == FULL for p in model.parameters())


def test_names_that_look_like_globs_are_exact_names() -> None:
    layers = {"age[years]": nn.Linear(2, 2), "b*": nn.Linear(2, 2), "bc": nn.Linear(2, 2)}
    model = Calls(lambda m, x: [layer(x) for layer in m.layers.values()], layers=nn.ModuleDict(layers))
    apply_policy(model, Policy(default="fp32", modules={"layers.age[years]": "bf16", "layers.b*": "fp16"}))
    with watch_dtypes(model) as log:
        model(torch.ones(1, 2))
    assert log["layers.age[years]"].computed == {BFLOAT}
    assert log["layers.b*"].computed == {HALF}
    assert log["layers.bc"].computed == {FULL}

"""From units and a search space to decisions: what is grouped, pinned and named."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torchvision
from torch import nn

from autoprec.errors import UsageError
from autoprec.policy import PRECISIONS, Precision
from autoprec.search.decision import Decision
from autoprec.search.decisions import build_decisions
from autoprec.search.space import Rule, SearchSpace, load_space
from autoprec.search.study_dtype import resolve_space


def fp16_space(name: str) -> SearchSpace:
    return resolve_space(load_space(name), "fp16")


@dataclass(frozen=True)
class FakeUnit:
    name: str
    type: str
    choices: tuple[Precision, ...] = PRECISIONS
    reasons: dict[Precision, str] = field(default_factory=dict)
    tied: tuple[str, ...] = ()


def leaves(model: nn.Module) -> list[FakeUnit]:
    """Leaves in definition order; attention is one unit."""
    found: list[FakeUnit] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{unit.name}.") for unit in found if unit.type == "MultiheadAttention")
        if not inside and (isinstance(module, nn.MultiheadAttention) or not list(module.children())):
            found.append(FakeUnit(name, type(module).__name__))
    return found


def decide(model: nn.Module, space: str, **changes: object) -> list[Decision]:
    return build_decisions(leaves(model), fp16_space(space).model_copy(update=changes), model)


@pytest.fixture(scope="module")
def resnet18() -> nn.Module:
    return torchvision.models.resnet18(weights=None)


@pytest.fixture(scope="module")
def small_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 16, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=64)


def test_every_unit_is_in_exactly_one_decision(resnet18: nn.Module, small_vit: nn.Module) -> None:
    for model in (resnet18, small_vit):
        for space in ("default", "cnn", "transformer"):
            names = [name for decision in decide(model, space) for name in decision.units]
            assert sorted(names) == sorted(unit.name for unit in leaves(model))


def test_a_norm_and_activation_go_with_the_convolution_before_them(resnet18: nn.Module) -> None:
    first = decide(resnet18, "cnn", repeats="separate")[0]
    assert first.name == "conv1"
    assert list(first.units) == ["conv1", "bn1", "relu", "maxpool"]


def test_a_pool_that_is_called_from_another_module_decides_for_itself(resnet18: nn.Module) -> None:
    assert [d.name for d in decide(resnet18, "cnn")][-2:] == ["avgpool", "fc"]


def test_equal_blocks_of_a_stage_share_their_decisions_and_stages_do_not(resnet18: nn.Module) -> None:
    names = [decision.name for decision in decide(resnet18, "cnn")]
    assert names[1:3] == ["layer1.0..1.conv1", "layer1.0..1.conv2"]
    assert "layer2.0.conv1" in names  # has a downsample path
    assert "layer2.1.conv1" in names
    assert len(names) == 20


def test_blocks_of_other_widths_are_no_repeats_and_those_of_other_inputs_are() -> None:
    mobile = torchvision.models.mobilenet_v2(weights=None)
    projections = [d.name for d in decide(mobile, "cnn") if d.name.endswith(".conv.2")]
    # stages of 24, 32, 64, 96, 160 and 320 channels; the first block of each is expanded from the width before
    blocks = ["2", "3", "4", "5..6", "7", "8..10", "11", "12..13", "14", "15..16", "17"]
    assert projections == [f"features.{block}.conv.2" for block in blocks]
    dense = torchvision.models.DenseNet(growth_rate=4, block_config=(3, 2), num_init_features=8, num_classes=2)
    names = [d.name for d in decide(dense, "cnn")]
    assert "features.denseblock1.denselayer1..3.conv1" in names


def test_a_vit_has_one_decision_for_each_layer_of_its_block_norms_and_dropouts_alone(small_vit: nn.Module) -> None:
    decisions = {d.name: d for d in decide(small_vit, "transformer")}
    block = "encoder.layers.encoder_layer_0..2"
    assert set(decisions) >= {f"{block}.ln_1", f"{block}.self_attention", f"{block}.dropout", "encoder.dropout"}
    assert list(decisions[f"{block}.ln_1"].units) == [f"encoder.layers.encoder_layer_{i}.ln_1" for i in range(3)]


def test_block_granularity_names_blocks_and_keeps_what_is_outside_them(resnet18: nn.Module) -> None:
    decisions = decide(resnet18, "cnn", granularity="block", repeats="separate")
    names = [d.name for d in decisions]
    blocks = [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]
    assert names == ["conv1", "bn1", "relu", "maxpool", *blocks, "avgpool", "fc"]
    assert dict(decisions[4].units) == {"layer1.0": "BasicBlock"}


def test_code_of_a_block_that_cannot_run_in_half_takes_the_choice_from_the_block(resnet18: nn.Module) -> None:
    space = fp16_space("cnn").model_copy(update={"granularity": "block", "repeats": "separate"})
    refused: dict[str, dict[Precision, str]] = {"layer1.0": {"fp16": "index_put needs one dtype"}}
    decisions = build_decisions(leaves(resnet18), space, resnet18, composites=refused)
    block = next(d for d in decisions if d.name == "layer1.0")
    assert block.choices == ("fp32", "autocast")
    assert block.reasons["fp16"] == "index_put needs one dtype"


def test_stage_granularity_names_the_runs_of_blocks(resnet18: nn.Module, small_vit: nn.Module) -> None:
    names = [d.name for d in decide(resnet18, "resnet", granularity="stage")]
    assert names == ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "fc"]
    stages = {d.name: d.units for d in decide(small_vit, "vit", granularity="stage")}
    assert stages["encoder.layers"] == {"encoder.layers": "Sequential"}


def test_code_inside_a_stage_that_cannot_run_in_half_takes_the_choice_from_the_stage(resnet18: nn.Module) -> None:
    space = fp16_space("resnet").model_copy(update={"granularity": "stage"})
    refused: dict[str, dict[Precision, str]] = {"layer1.0": {"fp16": "index_put needs one dtype"}}
    stages = {d.name: d for d in build_decisions(leaves(resnet18), space, resnet18, composites=refused)}
    assert stages["layer1"].choices == ("fp32", "autocast")
    assert stages["layer2"].choices == ("fp32", "autocast", "fp16")


def test_type_granularity_has_one_decision_for_each_class(resnet18: nn.Module) -> None:
    decisions = {d.name: d for d in decide(resnet18, "resnet", granularity="type")}
    kinds = ["Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d", "AdaptiveAvgPool2d", "Linear"]
    assert list(decisions) == kinds
    assert len(decisions["Conv2d"].units) == 20


def test_tied_units_share_a_decision_at_every_granularity() -> None:
    block = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)]
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "blocks": nn.ModuleList(block), "head": nn.Linear(2, 4)})
    units = [replace(unit, tied=("head",)) if unit.name == "embed" else unit for unit in leaves(model)]
    for granularity in ("leaf", "block", "stage", "type"):
        space = fp16_space("default").model_copy(update={"granularity": granularity})
        shared = [d for d in build_decisions(units, space, model) if {"embed", "head"} & set(d.units)]
        assert len(shared) == 1
        assert {"embed", "head"} <= set(shared[0].units)


def test_a_rules_start_is_kept_by_the_decisions_that_share_it(small_vit: nn.Module) -> None:
    starts = {d.name: d.start for d in decide(small_vit, "vit")}
    block = "encoder.layers.encoder_layer_0..2"
    assert starts[f"{block}.ln_1"] == starts["encoder.ln"] == starts["heads.head"] == "fp32"
    assert starts[f"{block}.self_attention"] == starts[f"{block}.mlp.0"] == "fp16"
    assert starts[f"{block}.dropout"] is None


def test_what_a_unit_cannot_do_is_no_choice_and_keeps_its_reason() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))
    units = [FakeUnit("0", "Linear"), FakeUnit("1", "LSTM", ("fp32",), {"autocast": "refused", "fp16": "no kernel"})]
    lstm = build_decisions(units, fp16_space("default"), model)[1]
    assert lstm.is_pinned
    assert lstm.reasons == {"autocast": "refused", "fp16": "no kernel"}


def test_a_rule_pins_what_it_names(resnet18: nn.Module) -> None:
    rule = Rule(names=["fc"], choices=["fp32"], reason="the head stays")
    fc = decide(resnet18, "cnn", rules=[rule])[-1]
    assert fc.choices == ("fp32",)
    assert fc.reasons == {"autocast": "the head stays", "fp16": "the head stays"}


def test_a_rule_that_matches_nothing_is_an_error_with_the_nearest_name(resnet18: nn.Module) -> None:
    rule = Rule(names=["layer4.1.conv3"], choices=["fp32"], reason="r")
    with pytest.raises(UsageError, match=r"matches no unit.*nearest: layer"):
        decide(resnet18, "cnn", rules=[rule])


def test_an_optional_rule_may_match_nothing(resnet18: nn.Module) -> None:
    rule = Rule(types=["Embedding"], choices=["fp32"], reason="r", optional=True)
    assert len(decide(resnet18, "cnn", rules=[rule])) == 20


def test_a_rule_for_layer_2_leaves_layer_20_alone() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(21)])
    space = fp16_space("default").model_copy(update={"rules": [Rule(names=["2"], choices=["fp32"], reason="r")]})
    pinned = [d.name for d in build_decisions(leaves(model), space, model) if d.is_pinned]
    assert pinned == ["2"]


def test_units_that_share_a_weight_share_a_decision_and_its_choices() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "mid": nn.Linear(2, 2), "head": nn.Linear(2, 4)})
    units = [
        FakeUnit("embed", "Embedding", tied=("head",)),
        FakeUnit("mid", "Linear"),
        FakeUnit("head", "Linear", ("fp32", "autocast"), {"fp16": "no"}, tied=("embed",)),
    ]
    decisions = build_decisions(units, fp16_space("default"), model)
    assert [(list(d.units), d.choices) for d in decisions] == [
        (["embed", "head"], ("fp32", "autocast")),
        (["mid"], ("fp32", "autocast", "fp16")),
    ]


def test_a_layer_that_holds_a_units_weight_and_is_never_called_goes_with_it() -> None:
    model = nn.ModuleDict({"shared": nn.Embedding(4, 2), "embed": nn.Embedding(4, 2), "mid": nn.Linear(2, 2)})
    units = [FakeUnit("embed", "Embedding", tied=("shared",)), FakeUnit("mid", "Linear")]
    decisions = build_decisions(units, fp16_space("default"), model)
    assert [(d.name, list(d.units), d.depth) for d in decisions] == [
        ("embed", ["embed", "shared"], 0.0),
        ("mid", ["mid"], 1.0),
    ]


def test_depth_runs_from_the_first_unit_to_the_last(resnet18: nn.Module) -> None:
    depths = {d.name: d.depth for d in decide(resnet18, "cnn", repeats="separate")}
    assert depths["fc"] == 1.0
    assert depths["conv1"] < depths["layer2.0.conv1"] < depths["layer3.0.conv1"] < depths["layer4.1.conv2"]


def test_a_space_needs_the_choices_of_the_baselines() -> None:
    with pytest.raises(ValueError, match="lacks autocast"):
        SearchSpace(name="x", choices=["fp32", "fp16"])

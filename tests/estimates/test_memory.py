from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autoprec
from autoprec.errors import TaskError, UsageError
from autoprec.estimates import MemoryBreakdown, StepSettings, estimate_step, peak_memory, real_peak, record_step
from autoprec.policy import OptimizerSettings, Policy

MIB = 2**20
SGD = StepSettings(optimizer=torch.optim.SGD)
POLICIES = {
    "fp32": Policy(default="fp32"),
    "autocast": Policy(default="autocast", dtype="fp16"),
    "fp16": Policy(default="fp16"),
}


def total(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum()


def classify(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def images(num_samples: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(num_samples, 3, size, size), torch.zeros(num_samples, dtype=torch.long)


def two_linears() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False))


def computed(
    model: nn.Module, batch: Any, loss: Callable[..., torch.Tensor] = total, *, rounding: int = 1, **settings: Any
) -> MemoryBreakdown:
    recording = record_step(model, batch, loss, settings=StepSettings(**settings))
    return peak_memory(recording, rounding_bytes=rounding)


def test_two_linears_under_sgd_peak_where_the_last_gradient_is_made() -> None:
    """8 MiB of weights, 1 of input, 1 of the gradient that flows back, 4 and 4 of weight gradients; scalars besides."""
    peak = computed(two_linears(), torch.zeros(256, 1024), optimizer=torch.optim.SGD)
    assert peak.peak_phase == "backward"
    assert 18 * MIB <= peak.peak_bytes <= 18 * MIB + 16
    assert peak.by_category["parameters"] == 8 * MIB
    assert peak.by_category["gradients"] == 8 * MIB
    assert peak.by_category["inputs"] == MIB
    assert peak.saved_by_unit["0"] == MIB


def test_autocast_adds_weight_casts_and_halves_what_is_saved() -> None:
    """The first layer keeps half copies of its input and output, .5 MiB each; the second its weight's cast, 2 MiB.

    The cast of the first weight is not kept: the input needs no gradient.
    """
    peak = computed(two_linears(), torch.zeros(256, 1024), optimizer=torch.optim.SGD, policy=POLICIES["autocast"])
    assert (peak.saved_by_unit["0"], peak.saved_by_unit["1"]) == (MIB, 2 * MIB)


def test_adamw_holds_two_states_and_foreach_a_temporary_of_every_parameter() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    foreach, single = (computed(model, torch.zeros(1, 1024), foreach=value) for value in (True, False))
    assert foreach.peak_phase == single.peak_phase == "optimizer"
    assert foreach.by_category["optimizer_state"] == 2 * 32 * MIB + 8 * 4
    assert foreach.by_category["temporaries"] == pytest.approx(32 * MIB, abs=64)
    assert single.by_category["temporaries"] <= 3 * 4 * MIB + 64


def test_amsgrad_and_momentum_are_counted() -> None:
    model, batch = two_linears(), torch.zeros(1, 1024)
    amsgrad = computed(model, batch, optimizer=torch.optim.Adam, optimizer_settings={"amsgrad": True})
    by_policy = computed(
        model,
        batch,
        optimizer=torch.optim.Adam,
        policy=Policy(default="fp32", optimizer=OptimizerSettings(amsgrad=True)),
    )
    momentum = computed(model, batch, optimizer=torch.optim.SGD, optimizer_settings={"lr": 0.1, "momentum": 0.9})
    assert amsgrad.by_category["optimizer_state"] == 24 * MIB + 2 * 4
    assert by_policy.by_category["optimizer_state"] == 24 * MIB + 2 * 4
    assert momentum.by_category["optimizer_state"] == 8 * MIB


def test_accumulation_keeps_gradients_through_the_forward_pass() -> None:
    """8 MiB of weights and 8 of old gradients beside a new one of 4; input, activation and its gradient 1 MiB each."""
    one = computed(two_linears(), torch.zeros(256, 1024), optimizer=torch.optim.SGD)
    many = computed(two_linears(), torch.zeros(256, 1024), optimizer=torch.optim.SGD, accumulation_steps=8)
    two = computed(two_linears(), torch.zeros(256, 1024), optimizer=torch.optim.SGD, accumulation_steps=2)
    assert one.peak_bytes < many.peak_bytes
    assert many.peak_bytes == two.peak_bytes
    assert 23 * MIB <= many.peak_bytes <= 23 * MIB + 64


def test_gradients_that_are_zeroed_in_place_stay_for_the_forward_pass() -> None:
    kept = computed(two_linears(), torch.zeros(4096, 1024), optimizer=torch.optim.SGD, set_to_none=False)
    freed = computed(two_linears(), torch.zeros(4096, 1024), optimizer=torch.optim.SGD)
    assert kept.peak_bytes > freed.peak_bytes
    assert kept.by_category["gradients"] == 8 * MIB


class Blocks(nn.Module):
    def __init__(self, *, checkpointed: bool, use_reentrant: bool = False) -> None:
        super().__init__()
        self.checkpointed, self.use_reentrant = checkpointed, use_reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.Dropout(0.1)) for _ in range(5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant) if self.checkpointed else block(x)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_checkpointing_keeps_the_inputs_of_blocks_alone(policy: Policy, use_reentrant: bool) -> None:
    batch = torch.zeros(4096, 256, requires_grad=use_reentrant)
    settings = {"optimizer": torch.optim.SGD, "policy": policy}
    full = computed(Blocks(checkpointed=False), batch, **settings)
    recomputed = computed(Blocks(checkpointed=True, use_reentrant=use_reentrant), batch, **settings)
    assert recomputed.by_category["activations"] < full.by_category["activations"] / 2
    assert recomputed.by_category["activations"] > 0


def test_categories_and_units_add_up_to_the_peak_and_storages_are_rounded() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    estimate = estimate_step(model, torch.zeros(4, 3), total)
    assert sum(estimate.by_category.values()) == estimate.peak_memory_bytes.value
    assert sum(estimate.by_unit.values()) == estimate.peak_memory_bytes.value
    assert estimate.peak_memory_bytes.value % 512 == 0
    assert estimate.by_category["parameters"] == 4 * 512
    assert estimate.by_category["buffers"] == 3 * 512
    assert estimate.peak_memory_bytes.kind == "computed"
    assert estimate.notes == ()


def test_a_dropout_mask_is_a_byte_an_element_on_cuda_and_a_float_on_a_cpu() -> None:
    model = nn.Sequential(nn.Linear(8, 1024), nn.Dropout(0.5), nn.Linear(1024, 8))
    cuda, cpu = (computed(model, torch.zeros(64, 8), as_on_cuda=value).saved_by_unit["1"] for value in (True, False))
    assert cuda == 64 * 1024 * (4 + 1)
    assert cpu == 64 * 1024 * (4 + 4)


def test_fused_attention_keeps_no_probabilities_whatever_its_dropout() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
    short, long = (computed(layer, torch.zeros(2, length, 32)).peak_bytes for length in (512, 1024))
    assert long < 2.1 * short


def small_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 2, 2, 64, 128, num_classes=10)


REAL_MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10),
    "squeezenet": lambda: torchvision.models.squeezenet1_1(num_classes=10),
    "vit": small_vit,
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("build", REAL_MODELS.values(), ids=REAL_MODELS)
def test_the_computed_peak_is_that_of_a_real_step(build: Callable[[], nn.Module], policy: Policy) -> None:
    settings = StepSettings(policy=policy, optimizer=torch.optim.SGD, as_on_cuda=False)
    model, batch = build(), images(8, 32)
    peak = peak_memory(record_step(model, batch, classify, settings=settings), rounding_bytes=1)
    assert peak.peak_bytes == pytest.approx(real_peak(model, batch, classify, settings=settings).peak_bytes, rel=0.01)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_second_step_of_a_real_run_peaks_as_computed(set_to_none: bool) -> None:
    settings = StepSettings(accumulation_steps=3, set_to_none=set_to_none)
    model, batch = two_linears(), torch.zeros(512, 1024)
    peak = peak_memory(record_step(model, batch, total, settings=settings), rounding_bytes=1)
    assert peak.peak_bytes == pytest.approx(real_peak(model, batch, total, settings=settings).peak_bytes, abs=64)


def test_another_batch_and_image_size_equals_a_batch_of_that_size() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )
    scaled = computed(model, images(2, 64), classify, batch_size=6, image_size=32)
    assert scaled == computed(model, images(6, 32), classify)


def test_the_model_its_gradients_and_all_randomness_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).eval()
    model[0].weight.grad = torch.full((8, 8), 3.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    copied = batch.clone()
    for measured in (False, True):
        record_step(model, batch, total, settings=StepSettings(policy=POLICIES["autocast"]), fake=not measured)
        assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert torch.equal(model[0].weight.grad, torch.full((8, 8), 3.0))
        assert model[0].bias.grad is None
        assert not model.training
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        assert autoprec.apply.applied_policy(model) is None
        assert torch.equal(torch.get_rng_state(), torch_state)
        assert random.getstate() == python_state
        assert torch.equal(batch, copied)


def test_without_a_policy_the_one_that_the_model_carries_counts() -> None:
    model = two_linears()
    batch = torch.zeros(256, 1024)
    bare, expected = computed(model, batch), computed(model, batch, policy=POLICIES["autocast"])
    autoprec.apply_policy(model, POLICIES["autocast"])
    assert computed(model, batch) == expected
    assert computed(model, batch, policy=POLICIES["fp32"]).peak_bytes == bare.peak_bytes
    assert autoprec.apply.applied_policy(model) == POLICIES["autocast"]


def test_layer_norms_follow_cuda_and_half_ones_save_memory() -> None:
    """CUDA's autocast lifts a LayerNorm to FP32 (4 bytes an element saved and made); a half one keeps 2."""
    model = nn.Sequential(nn.Linear(64, 1024), nn.LayerNorm(1024), nn.Linear(1024, 64))
    lifted = computed(model, torch.zeros(512, 64), policy=POLICIES["autocast"])
    half = computed(model, torch.zeros(512, 64), policy=POLICIES["autocast"].replace(modules={"1": "fp16"}))
    assert half.saved_by_unit["1"] < lifted.saved_by_unit["1"] / 1.9


def test_an_estimate_inside_emulation_is_the_same() -> None:
    model, batch = small_vit(), images(4, 32)
    outside = computed(model, batch, classify, policy=POLICIES["fp16"])
    with autoprec.emulate():
        assert computed(model, batch, classify, policy=POLICIES["fp16"]) == outside


def test_tied_weights_are_counted_once() -> None:
    model = two_linears()
    model[1].weight = model[0].weight
    assert computed(model, torch.zeros(2, 1024)).by_category["parameters"] == 4 * MIB


class Branching(nn.Module):
    """Looks at a value, which no fake tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1024, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return x * 2 if x.sum().item() > 0 else x


def test_a_model_that_fake_tensors_cannot_run_is_measured_on_the_given_batch() -> None:
    estimate = estimate_step(Branching(), torch.zeros(64, 1024), total, optimizer=torch.optim.SGD)
    assert estimate.peak_memory_bytes.kind == "measured"
    assert 8 * MIB <= estimate.peak_memory_bytes.value < 10 * MIB
    assert estimate.num_samples == 64
    assert "its memory was measured on a real step" in estimate.notes[0]


def test_a_scripted_part_is_measured() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.warns(FutureWarning, match=r"torch\.jit"):
        model[1] = torch.jit.script(model[1])
    estimate = estimate_step(model, torch.zeros(4, 8), total)
    assert estimate.peak_memory_bytes.kind == "measured"


def test_the_users_own_error_comes_through() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        estimate_step(two_linears(), torch.zeros(2, 7), total)


def test_a_loss_that_trains_another_model_is_refused_and_leaves_it_alone() -> None:
    model, other = two_linears(), nn.Linear(4, 4)
    with pytest.raises(TaskError, match="no parameter of the model"):
        estimate_step(model, torch.zeros(2, 4), lambda _, batch: other(batch).sum())
    assert other.weight.grad is None


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(TaskError, match="nothing would be trained"):
        estimate_step(two_linears().requires_grad_(False), torch.zeros(2, 1024), total)


def test_an_optimizer_with_a_closure_is_refused() -> None:
    with pytest.raises(TaskError, match="LBFGS"):
        estimate_step(two_linears(), torch.zeros(2, 1024), total, optimizer=torch.optim.LBFGS)


@pytest.mark.parametrize("name", ["batch_size", "image_size", "accumulation_steps"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        estimate_step(two_linears(), torch.zeros(2, 1024), total, **{name: 0})


def test_a_batch_may_be_a_function_and_samples_may_be_counted_otherwise() -> None:
    estimate = estimate_step(
        two_linears(), lambda: torch.zeros(6, 1024), total, num_samples=lambda batch: 3, accumulation_steps=2
    )
    assert estimate.num_samples == 6


def test_compiled_and_parallel_models_are_estimated_as_the_model_inside() -> None:
    model, batch = two_linears(), torch.zeros(8, 1024)
    assert computed(torch.compile(model), batch) == computed(model, batch)
    assert computed(nn.DataParallel(model), batch) == computed(model, batch)


def test_a_weight_heavy_model_needs_more_memory_under_autocast() -> None:
    """FP32 masters, their gradients and besides the half copies: more than FP32 alone where activations are few."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)))
    base, amp = (
        computed(model, torch.zeros(4, 1024), optimizer=torch.optim.SGD, policy=POLICIES[p])
        for p in POLICIES
        if p != "fp16"
    )
    assert amp.peak_bytes > base.peak_bytes


def test_an_lstm_saves_its_gates_in_either_precision() -> None:
    """Four gates and a cell of 32 values for 16 samples and 8 steps, at least."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(16, 32, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0][:, -1]

    base, amp = (
        computed(Last(), torch.zeros(16, 8, 16), policy=POLICIES[p]).saved_by_unit["lstm"]
        for p in POLICIES
        if p != "fp16"
    )
    assert base >= 5 * 32 * 16 * 8 * 4
    assert amp < 0.7 * base


def test_sparse_gradients_are_counted_by_their_parts() -> None:
    model = nn.Sequential(nn.Embedding(1000, 64, sparse=True), nn.Flatten(), nn.Linear(128, 4))
    batch = torch.zeros(8, 2, dtype=torch.long)
    peak = computed(model, batch, optimizer=torch.optim.SGD)
    assert peak.peak_bytes == real_peak(model, batch, total, settings=SGD).peak_bytes
    assert peak.by_category["gradients"] < 1000 * 64 * 4


def test_a_lazy_model_is_sent_back_to_be_run_once() -> None:
    with pytest.raises(TaskError, match="run the model once"):
        estimate_step(nn.Sequential(nn.LazyLinear(4)), torch.zeros(2, 3), total)


@pytest.mark.slow
def test_known_figures_of_resnet50_and_vit() -> None:
    """resnet50 at batch 128: 10.54 and 5.58 GiB; vit_b_16 at batch 64, SGD: 7.49, 4.57, half norms 4.10."""
    momentum = {"lr": 0.1, "momentum": 0.9}
    resnet = torchvision.models.resnet50()
    for policy, gib in ((POLICIES["fp32"], 10.54), (POLICIES["autocast"], 5.58)):
        peak = computed(
            resnet, images(2, 224), classify, policy=policy, batch_size=128, optimizer=torch.optim.SGD,
            optimizer_settings=momentum,
        )  # fmt: skip
        assert peak.peak_bytes / 2**30 == pytest.approx(gib, abs=0.02)
    vit = torchvision.models.vit_b_16()
    halves = {name: "fp16" for name, module in vit.named_modules() if isinstance(module, nn.LayerNorm)}
    stream = POLICIES["autocast"].replace(modules=halves | {"encoder.dropout": "fp16"})
    for policy, gib in ((POLICIES["fp32"], 7.49), (POLICIES["autocast"], 4.57), (stream, 4.11)):
        peak = computed(vit, images(2, 224), classify, policy=policy, batch_size=64, optimizer=torch.optim.SGD)
        assert peak.peak_bytes / 2**30 == pytest.approx(gib, abs=0.01)

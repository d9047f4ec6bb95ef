"""Policies on CUDA: what its kernels refuse, what cuDNN keeps, graphs, fused optimizers, several devices' kinds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from autoprec import Policy, apply_policy, build_grad_scaler, build_optimizer, emulate, remove_policy
from autoprec.apply.portability import has_native_bf16
from autoprec.apply.training_options import set_tf32, uses_tf32
from autoprec.errors import PrecisionWarning
from autoprec.policy import Provenance, TrainingOptions
from autoprec.probes.dtypes import watch_dtypes
from autoprec.training import TrainingStep
from autoprec.units import find_units

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

HALF, FULL = torch.float16, torch.float32
STOCK = Policy(default="autocast", dtype="fp16")


class Spectrum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x).abs()


class Probable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 1)
        self.loss = nn.BCELoss()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = torch.sigmoid(self.head(x))
        return self.loss(p, torch.ones_like(p))


def overflowing(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor(float("inf"), device=x.device)


@pytest.mark.parametrize("precision", ["fp32", "autocast", "fp16"])
def test_bce_on_probabilities_is_fp32_inside_a_model_where_autocast_bans_it(precision: Any) -> None:
    torch.manual_seed(0)
    model, x = Probable().cuda(), torch.randn(16, 8, device="cuda")
    bare = model(x).item()
    with pytest.raises(RuntimeError, match="unsafe to autocast"), torch.autocast("cuda", HALF):
        model(x)
    assert apply_policy(model, Policy(default=precision))(x).item() == pytest.approx(bare, rel=2e-3)


@pytest.mark.parametrize("size", [192, 256])
def test_an_fp32_unit_takes_ffts_of_every_size_where_half_takes_powers_of_two(size: int) -> None:
    model = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), Spectrum()).cuda()
    x = torch.randn(1, 1, size, device="cuda")
    if size == 192:
        with pytest.raises(RuntimeError, match="power"):
            torch.fft.rfft(x.half())
    apply_policy(model, Policy(default="fp16", modules={"1": "fp32"}))
    with watch_dtypes(model) as log:
        assert model(x).shape == (1, 2, size // 2 + 1)
    assert log["1"].computed == {FULL}


@pytest.mark.filterwarnings("error:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_run_in_half_on_one_flat_buffer_and_go_back(make: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(make(16, 16, batch_first=True, bidirectional=True)).cuda(), torch.randn(4, 8, 16).cuda()
    bare = model(x)[0]
    apply_policy(model, Policy(default="fp16"))
    output = model(x)[0]
    output.sum().backward()
    torch.testing.assert_close(output, bare, rtol=2e-2, atol=2e-2)
    assert all(p.dtype == FULL and p.grad is not None and p.grad.dtype == FULL for p in model.parameters())
    assert torch.equal(remove_policy(model)(x)[0], bare)


def test_synchronised_batch_norm_of_one_process_trains_under_a_policy(tmp_path: Any) -> None:
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))).cuda()
        apply_policy(model, Policy(default="fp16"))
        model(torch.randn(4, 3, 8, 8, device="cuda") * 100).square().mean().backward()
        assert model[1].running_var.dtype == FULL
        assert model[1].running_var.isfinite().all()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("clip", [None, 1.0])
def test_fused_foreach_and_plain_adamw_agree_and_skip_the_infinite_step(clip: float | None) -> None:
    ends = []
    for settings in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        torch.manual_seed(0)
        model = apply_policy(nn.Linear(8, 8).cuda(), STOCK)
        optimizer = build_optimizer(STOCK, torch.optim.AdamW, model.parameters(), lr=1e-2, **settings)
        step = TrainingStep(optimizer, grad_scaler=build_grad_scaler(STOCK, device="cuda"), max_grad_norm=clip)
        for index in range(5):
            loss = model(torch.ones(4, 8, device="cuda")).square().mean()
            step(overflowing(loss) if index == 2 else loss)
        assert (step.num_steps_taken, step.num_steps_skipped) == (4, 1)
        ends.append(model.weight.detach().clone())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ends[1], ends[2], rtol=1e-5, atol=1e-6)


def test_a_graph_captured_under_a_policy_replays_what_it_computed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)).cuda().eval()
    apply_policy(model, Policy(default="autocast", modules={"1": "fp16"}))
    static = torch.randn(8, 16, device="cuda")
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            model(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        captured = model(static)
    other = torch.randn(8, 16, device="cuda")
    static.copy_(other)
    graph.replay()
    with torch.no_grad():
        torch.testing.assert_close(captured, model(other))


def test_channels_last_reaches_every_convolution() -> None:
    model = torchvision.models.resnet18(num_classes=10).cuda().to(memory_format=torch.channels_last)
    apply_policy(model, Policy(default="fp16"))
    formats = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(
                lambda m, args, output: formats.append(output.is_contiguous(memory_format=torch.channels_last))
            )
    model(torch.randn(4, 3, 64, 64, device="cuda").contiguous(memory_format=torch.channels_last))
    assert formats
    assert all(formats)


def test_the_dtypes_of_every_unit_are_those_of_the_emulation() -> None:
    policy = Policy(default="autocast", modules={"layer1": "fp16", "layer4": "fp32", "fc": "fp16"})
    found = []
    for device in ("cpu", "cuda"):
        model = apply_policy(torchvision.models.resnet18(num_classes=10).to(device), policy)
        images = torch.randn(4, 3, 32, 32, device=device)
        if device == "cpu":
            with emulate(), watch_dtypes(model) as log:
                F.cross_entropy(model(images), torch.zeros(4, dtype=torch.long))
        else:
            with watch_dtypes(model) as log:
                F.cross_entropy(model(images), torch.zeros(4, dtype=torch.long, device=device))
        found.append({name: unit.outputs for name, unit in log.units.items() if unit.num_calls})
    assert found[0] == found[1]


def test_a_dry_run_leaves_the_random_state_of_the_device_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).cuda()
    before = torch.cuda.get_rng_state()
    units = find_units(model, run=lambda m: m(torch.randn(2, 8, device="cuda")).sum())
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert all("fp16" in unit.choices for unit in units)


def test_bf16_is_native_from_capability_8() -> None:
    assert has_native_bf16(torch.device("cuda")) is (torch.cuda.get_device_capability() >= (8, 0))


def test_a_policy_from_another_gpu_or_device_warns_with_both_names() -> None:
    for where, words in (
        (Provenance(device_type="cuda", device_name="NVIDIA X1"), "GPU NVIDIA X1 -> "),
        (Provenance(device_type="cpu"), "device cpu -> cuda"),
    ):
        with pytest.warns(PrecisionWarning, match=words):
            apply_policy(nn.Linear(2, 2).cuda(), STOCK.replace(provenance=where))


def test_tf32_is_switched_for_products_convolutions_and_recurrent_layers_together() -> None:
    before = uses_tf32()
    try:
        set_tf32(True)
        assert uses_tf32() is True
        with pytest.warns(PrecisionWarning, match="TF32 switched off"):
            apply_policy(nn.Linear(2, 2).cuda(), STOCK.replace(training=TrainingOptions(tf32=False)))
    finally:
        set_tf32(bool(before))


def test_a_compiled_model_under_a_policy_equals_the_eager_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).cuda()
    apply_policy(model, Policy(default="autocast", modules={"2": "fp16"}))
    x = torch.randn(8, 32, device="cuda")
    eager = model(x)
    torch.testing.assert_close(torch.compile(copy.deepcopy(model), fullgraph=True)(x), eager, rtol=1e-2, atol=1e-2)


def test_a_cudagraph_of_inductor_trains_a_model_under_a_policy() -> None:
    model = apply_policy(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)).cuda(), STOCK)
    compiled = torch.compile(model, mode="reduce-overhead")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = compiled(torch.ones(8, 32, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)

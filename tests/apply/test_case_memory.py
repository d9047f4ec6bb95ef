"""Reported situations with their right values: checkpointing, repeated casts, memory that stays flat."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from apply_models import Calls
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoprec import Policy, apply_policy
from autoprec.apply.state import num_weight_casts
from autoprec.probes.dtypes import watch_dtypes

HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32
HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32


# C19: checkpointing


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "autocast"])
def test_c19_a_weight_shared_by_two_checkpointed_blocks(use_reentrant: bool, precision: Any) -> None:
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(m: Any, x: torch.Tensor, saves: bool) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(m.shared, x, use_reentrant=use_reentrant) if saves else m.shared(x)
        return x

    model = apply_policy(Calls(forward, shared=shared), Policy(default=precision, dtype="bf16"))
    gradients = []
    for saves in (False, True):
        model.zero_grad()
        model(torch.ones(2, 4, requires_grad=True), saves).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, saved in zip(*gradients, strict=True):
        torch.testing.assert_close(saved, plain, rtol=2e-2, atol=2e-2)


def test_c19_a_backward_inside_the_forward_recomputes_in_the_right_precision() -> None:
    seen: list[torch.dtype] = []

    def note(m: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype)
        return x * m.weight.weight

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(m.inner, x, use_reentrant=False).sum()
        (gradient,) = torch.autograd.grad(inner, x, create_graph=False)
        return gradient

    half = Calls(note, weight=nn.Linear(4, 4))
    model = apply_policy(
        Calls(forward, inner=half), Policy(default="autocast", dtype="bf16", modules={"inner": "fp16"})
    )
    model(torch.ones(4, 4, requires_grad=True))
    assert seen == [HALF, HALF]


# C38 and C40: casts and memory


def test_c38_an_evaluation_in_the_users_autocast_leaves_the_gradients() -> None:
    for precision in ("autocast", "fp16"):
        model = apply_policy(nn.Sequential(nn.Linear(10, 20)), Policy(default=precision))
        with torch.autocast("cpu", dtype=torch.float16):
            with torch.no_grad():
                model(torch.randn(2, 10))
            model(torch.randn(2, 10)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


def test_c38_gradients_switched_on_inside_a_forward_without_them() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            m.layer(x).sum().backward()
        return x

    model = apply_policy(Calls(forward, layer=nn.Linear(4, 4)), Policy(default="fp16"))
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert model.layer.bias.grad.tolist() == [1.0] * 4


@pytest.mark.parametrize("frozen", [False, True])
def test_c40_a_shared_layer_is_cast_once_a_forward(frozen: bool) -> None:
    layer = nn.Linear(16, 16).requires_grad_(not frozen)
    model = apply_policy(Calls(lambda m, x: m.l(m.l(m.l(x))), l=layer), Policy(default="fp32", modules={"l": "fp16"}))
    with watch_dtypes(model) as log:
        model(torch.randn(2, 16))
    assert num_weight_casts() == 2
    casts = [o for unit in log.units.values() for o in unit.operators if o.name == "_to_copy" and o.outputs == {HALF}]
    assert len(casts) == 3
    assert log["l"].num_calls == 3


def test_c40_autocast_casts_of_trainable_weights_equal_their_number() -> None:
    layer = nn.Linear(16, 16)
    model = Calls(lambda m, x: m.other(m.l(m.full(m.l(x)))), l=layer, full=nn.Linear(16, 16), other=nn.Linear(16, 16))
    apply_policy(model, Policy(default="autocast", modules={"full": "fp32"}))
    with watch_dtypes(model) as log:
        model(torch.randn(2, 16))
    matrices = [
        o
        for n in ("l", "other")
        for o in log[n].operators
        if o.name == "_to_copy" and o.inputs == {FULL} and o.outputs == {HALF}
    ]
    num_inputs, num_weights = 2, 4
    assert len(matrices) == num_inputs + num_weights


def test_c40_memory_after_fifty_forwards_is_flat() -> None:
    import gc

    model = apply_policy(
        nn.Sequential(nn.Linear(8, 8), nn.GRU(8, 8), Calls(lambda m, x: x[0])),
        Policy(default="fp16", modules={"0": "autocast"}),
    )

    def live() -> int:
        gc.collect()
        return sum(type(item) is torch.Tensor for item in gc.get_objects())

    counts = []
    for index in range(52):
        model(torch.randn(3, 8)).sum().backward()
        if index in (1, 51):
            counts.append(live())
    assert counts[0] == counts[1]


def test_c42_channels_last_is_kept() -> None:
    for precision in ("autocast", "fp16", "fp32"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
        model = apply_policy(
            model.to(memory_format=torch.channels_last), Policy(default=precision, modules={"3": "bf16"})
        )
        output = model(torch.randn(2, 3, 9, 9).contiguous(memory_format=torch.channels_last))
        assert output.is_contiguous(memory_format=torch.channels_last)
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)

"""Reported situations with their right values: what people do to models, and forwards of other kinds."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
from apply_models import Calls
from torch import nn

from autoprec import Policy, apply_policy, emulate, remove_policy
from autoprec.apply import checkpoint_modules
from autoprec.apply.state import num_weight_casts
from autoprec.errors import ApplyError, PrecisionWarning
from autoprec.policy import Precision
from autoprec.probes.dtypes import watch_dtypes

HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32
HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32


# What people do to models


def test_a_part_called_from_outside_computes_in_its_precision() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.encode(x))

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.encoder(x)

    for precision, dtype in (("autocast", HALF), ("fp16", HALF), ("bf16", BFLOAT), ("fp32", FULL)):
        model = apply_policy(Encoder(), Policy(default=precision))
        with watch_dtypes(model) as log:
            encoded = model.encode(torch.ones(1, 4))
        assert log["encoder.0"].computed == log["encoder.1"].computed == {dtype}
        assert encoded.dtype is FULL


def test_code_between_the_units_of_a_part_called_from_outside_is_in_its_precision() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            self.sum = hidden + x
            return self.second(self.sum)

    for precision, dtype in (("fp16", HALF), ("bf16", BFLOAT), ("fp32", FULL)):
        model = nn.Module()
        model.part = Residual()
        apply_policy(model, Policy(default=precision))
        with emulate():
            assert model.part(torch.ones(1, 4)).dtype is FULL
        assert model.part.sum.dtype is dtype


@pytest.mark.parametrize("precision", ["autocast", "fp16"])
@pytest.mark.parametrize("container", [False, True], ids=["model", "ModuleDict"])
def test_a_loss_of_parts_called_from_outside_is_fp32(precision: Precision, container: bool) -> None:
    parts = {"maker": nn.Linear(1, 4, bias=False), "critic": nn.Linear(4, 1, bias=False)}
    model = nn.ModuleDict(parts)
    if not container:
        model, model.maker, model.critic = nn.Module(), parts["maker"], parts["critic"]
    nn.init.constant_(parts["maker"].weight, 1.0)
    nn.init.constant_(parts["critic"].weight, 75.0)
    apply_policy(model, Policy(default=precision))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        score = parts["critic"](parts["maker"](torch.ones(2, 1)))
    assert nn.functional.mse_loss(score, torch.zeros(2, 1)).item() == 90000.0  # in half: inf


def test_a_model_that_calls_itself_is_one_forward() -> None:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return self.layer(self(x, depth - 1)) if depth else x

    model = apply_policy(Tree(), Policy(default="fp16"))
    with watch_dtypes(model) as log:
        assert model(torch.ones(1, 4)).dtype == FULL
    assert log["layer"].inputs == {HALF}
    assert num_weight_casts() == 2


def test_weights_exchanged_inside_the_forward_are_the_ones_used() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        changed = {name: p * 0 + 2 for name, p in m.layer.named_parameters()}
        return m.layer(x) + 100 * torch.func.functional_call(m.layer, changed, (x,)) + m.layer(x)

    model = Calls(forward, layer=nn.Linear(2, 1, bias=False))
    model.layer.weight.data.fill_(1.0)
    for precision in ("fp16", "autocast"):
        apply_policy(model, Policy(default=precision))
        output = model(torch.ones(1, 2))
        assert output.item() == 2 + 400 + 2
        output.backward()
        assert model.layer.weight.grad.tolist() == [[2.0, 2.0]]
        model.zero_grad()
        remove_policy(model)


@pytest.mark.parametrize("how", ["in place", "data"])
def test_a_momentum_encoder_moved_inside_the_forward_computes_with_its_new_weights(how: str) -> None:
    @torch.no_grad()
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        for moved, leading in zip(m.follower.parameters(), m.leader.parameters(), strict=True):
            if how == "data":
                moved.data = moved.data * 0.5 + leading.data * 0.5
            else:
                moved.mul_(0.5).add_(leading, alpha=0.5)
        return m.follower(x)

    model = Calls(forward, leader=nn.Linear(2, 1, bias=False), follower=nn.Linear(2, 1, bias=False))
    model.leader.weight.data.fill_(3.0)
    model.follower.weight.data.fill_(1.0)
    apply_policy(model.requires_grad_(False), Policy(default="bf16"))
    assert [model(torch.ones(1, 2)).item() for _ in range(2)] == [4.0, 5.0]
    assert model.follower.weight.tolist() == [[2.5, 2.5]]


def test_a_sequence_changed_after_the_policy_runs_all_its_layers() -> None:
    model = apply_policy(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Policy(default="fp32", modules={"0": "fp16"}))
    model.append(nn.Linear(2, 5))
    assert model(torch.ones(1, 2)).shape == (1, 5)


def test_a_forward_of_the_users_own_is_wrapped_and_given_back() -> None:
    layer = nn.Linear(2, 2)
    own = lambda x: nn.Linear.forward(layer, x) * 0 + 7  # noqa: E731
    layer.forward = own
    model = nn.Sequential(layer)
    apply_policy(model, Policy(default="fp16"))
    assert model(torch.ones(1, 2)).tolist() == [[7.0, 7.0]]
    remove_policy(model)
    assert layer.forward is own


def test_an_inner_autocast_of_the_users_keeps_its_meaning() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return m.layer(x)

    model = apply_policy(Calls(forward, layer=nn.Linear(4, 4)), Policy(default="autocast"))
    with watch_dtypes(model) as log:
        model(torch.ones(1, 4))
    assert log["layer"].computed == {FULL}


def test_parallel_branches_in_threads_do_not_lock_up() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        def branch(layer: nn.Module) -> torch.Tensor:
            with emulate():
                return layer(x)

        with ThreadPoolExecutor(2) as pool:
            return sum(pool.map(branch, (m.a, m.b)))

    model = apply_policy(Calls(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), Policy(default="fp16"))
    assert model(torch.ones(1, 4)).dtype == FULL


def test_a_model_over_two_devices_runs_each_part_where_it_is() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.second(m.first(x).to("meta"))

    model = Calls(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 2, device="meta"))
    for precision in ("fp16", "autocast", "fp32"):
        apply_policy(model, Policy(default=precision, modules={"second": "bf16"}))
        output = model(torch.ones(1, 4))
        assert (output.device.type, output.dtype, tuple(output.shape)) == ("meta", FULL, (1, 2))
        remove_policy(model)


def test_old_weight_norm_casts_the_weight_it_computes() -> None:
    with pytest.warns(FutureWarning):
        layer = torch.nn.utils.weight_norm(nn.Linear(4, 4))
    model = apply_policy(nn.Sequential(layer, nn.Linear(4, 4)), Policy(default="fp16"))
    for _ in range(2):
        with watch_dtypes(model) as log:
            model(torch.ones(1, 4)).sum().backward()
    assert [o.inputs for o in log["0"].operators if o.name == "addmm"] == [{HALF}]
    assert layer.weight.dtype == FULL
    assert layer.weight_g.grad.dtype == FULL


def test_plain_tensor_attributes_are_cast_and_given_back() -> None:
    model = Calls(lambda m, x: x @ m.matrix)
    model.matrix = torch.eye(4)
    apply_policy(model, Policy(default="fp16"))
    with watch_dtypes(model) as log:
        model(torch.ones(1, 4))
    assert log[""].computed == {HALF}
    assert model.matrix.dtype == FULL


def test_a_whole_model_saved_with_its_policy_needs_no_source_of_it() -> None:
    model = apply_policy(nn.Sequential(nn.Linear(2, 2)), Policy(default="fp16"))
    model(torch.ones(1, 2))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_transformer_layers_in_evaluation_run_their_children_in_their_precisions() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    apply_policy(encoder, Policy(default="fp16", modules={"layers.1": "fp32", "layers.0.linear1": "bf16"}))
    mask = torch.tensor([[False, False, False], [False, False, True]])
    with torch.inference_mode(), watch_dtypes(encoder) as log:
        encoder(torch.randn(2, 3, 8), src_key_padding_mask=mask)
    assert BFLOAT in log["layers.0.linear1"].computed
    assert HALF in log["layers.0.linear2"].computed
    assert FULL in log["layers.1.linear2"].computed
    assert HALF not in log["layers.1.linear2"].computed


# Forwards of other kinds


class Static(nn.Module):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


class OfClass(nn.Module):
    @classmethod
    def forward(cls, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


@pytest.mark.parametrize("precision", ["fp32", "autocast", "bf16"])
@pytest.mark.parametrize("make", [Static, OfClass])
def test_static_and_class_methods_are_forwards_too(make: type[nn.Module], precision: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), make())
    bare = model(torch.ones(1, 4))
    apply_policy(model, Policy(default="fp32", dtype="bf16", modules={"1": precision}))
    torch.testing.assert_close(model(torch.ones(1, 4)), bare, rtol=1e-2, atol=1e-2)
    checkpoint_modules(model, ["1"])
    model(torch.ones(1, 4)).sum().backward()
    assert apply_policy(make(), Policy(default=precision, dtype="bf16"))(torch.ones(2)).dtype == FULL


@pytest.mark.parametrize("precision", ["fp32", "autocast", "fp16", "bf16"])
@pytest.mark.parametrize("is_root", [True, False])
def test_a_forward_that_yields_computes_each_step_in_its_precision(is_root: bool, precision: Any) -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))
            self.seen: list[torch.dtype] = []

        def forward(self, x: torch.Tensor) -> Any:
            for _ in range(2):
                x = x @ self.weight
                self.seen.append(x.dtype)
                yield x
            return "end"

    steps = Steps()
    model = steps if is_root else Calls(lambda m, x: list(m.steps(x)), steps=steps)
    rules = {} if is_root else {"steps": precision}
    apply_policy(model, Policy(default=precision if is_root else "fp32", dtype="bf16", modules=rules))
    items = list(model(torch.ones(1, 4)))
    expected = {"fp32": FULL, "fp16": HALF}.get(precision, BFLOAT)
    assert steps.seen == [expected, expected]
    assert [item[0, 0].item() for item in items] == [4.0, 16.0]
    assert {item.dtype for item in items} == {FULL}
    assert steps.weight.dtype == FULL
    if is_root:
        steps_left = model(torch.ones(1, 4))
        next(steps_left)
        steps_left.close()


def test_an_async_forward_is_refused_where_it_would_compute_in_fp32() -> None:
    class Later(nn.Module):
        async def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = nn.Sequential(Later())
    with pytest.raises(ApplyError, match=r"'0' has an `async` forward.*found bf16; allowed: fp32"):
        apply_policy(model, Policy(default="bf16"))
    apply_policy(model, Policy(default="bf16", modules={"0": "fp32"}))

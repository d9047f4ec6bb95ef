"""What is watched of a loop: misuse of the scaler, logarithms of 0, parameters, hooks that leave no trace."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.doctor import diagnose, examine, watch
from autoprec.emulation import emulate


def training(step: Callable[..., None], *, loss: Callable[..., torch.Tensor] | None = None) -> Callable[[], None]:
    """Return a small loop that ends each of its six steps as `step(scaler, optimizer)` says."""

    def train() -> None:
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
        for _ in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                output = model(torch.randn(16, 8))
                value = nn.functional.mse_loss(output, torch.zeros(16, 8)) if loss is None else loss(output)
            scaler.scale(value).backward()
            step(scaler, optimizer)

    return train


def right(scaler: Any, optimizer: Any) -> None:
    scaler.step(optimizer)
    scaler.update()


def around_the_scaler(scaler: Any, optimizer: Any) -> None:
    optimizer.step()


def without_update(scaler: Any, optimizer: Any) -> None:
    scaler.step(optimizer)


def without_step(scaler: Any, optimizer: Any) -> None:
    pass


def clip_values_first(scaler: Any, optimizer: Any) -> None:
    nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 1.0)
    right(scaler, optimizer)


@pytest.mark.parametrize(
    ("step", "trouble"),
    [
        (right, None),
        (around_the_scaler, "stepped on scaled gradients"),
        (without_update, "scaler without update"),
        (without_step, "no steps"),
        (clip_values_first, "clipped before unscale_"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_misuse_of_the_scaler_has_its_name(step: Callable[..., None], trouble: str | None) -> None:
    findings = diagnose(examine(training(step), num_steps=4))
    assert trouble in [*(finding.name for finding in findings), *([] if findings else [None])]


def test_the_logarithm_of_a_probability_that_is_0_is_a_loss_of_inf() -> None:
    def loss(output: torch.Tensor) -> torch.Tensor:
        return -(1000 * output).softmax(1)[:, 0].log().mean()

    findings = diagnose(examine(training(right, loss=loss), num_steps=4))
    found = next(finding for finding in findings if finding.name == "non-finite loss")
    assert "log of 0" in found.seen
    assert "log_softmax" in found.change


def test_a_mask_of_minus_infinity_is_no_overflow() -> None:
    mask = torch.full((16, 8), -1e9).triu(1)

    def loss(output: torch.Tensor) -> torch.Tensor:
        scores = (output + mask.half()).masked_fill(mask < 0, -torch.inf)
        return nn.functional.mse_loss(scores.softmax(1), torch.zeros(16, 8))

    seen = examine(training(right, loss=loss), num_steps=3)
    assert [birth for birth in seen.births if not birth.backward] == []


def test_flushed_gradients_are_those_that_fp16_cannot_hold() -> None:
    layer = nn.Linear(4, 1, bias=False)
    with emulate(), watch(layer) as seen:
        with torch.autocast("cpu", dtype=torch.float16):
            output = layer(torch.tensor([[1.0, 2.0**-10, 2.0**-20, 0.0]]))
        (output.float().sum() * 2.0**-14).backward()
    lost = seen.flushed[""]
    # The gradient of the weight is 2**-14 times the input: 2**-24 is FP16's smallest, 2**-34 rounds to 0, 0 is 0.
    assert (lost.num_flushed, lost.magnitude_share < 1e-3) == (1, True)


def test_a_training_without_half_and_one_with_odd_sizes_get_a_note_and_no_more() -> None:
    def train(size: int, *, half: bool) -> list[tuple[str, str, bool]]:
        def loop() -> None:
            model = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size))
            optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", enabled=half)
            for _ in range(3):
                with torch.autocast("cpu", dtype=torch.float16, enabled=half):
                    loss = model(torch.randn(16, size)).float().square().mean()
                scaler.scale(loss).backward()
                right(scaler, optimizer)

        return [(finding.name, finding.unit, finding.is_wrong) for finding in diagnose(examine(loop, num_steps=3))]

    assert train(16, half=True) == []
    assert train(16, half=False) == [("nothing in half", "", False)]
    assert train(17, half=True) == [("sizes that are no multiples of 8", "2", False)]


def test_watching_leaves_no_trace_and_changes_no_number() -> None:
    def weights(watched: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(16, 8)

        def step() -> None:
            with torch.autocast("cpu", dtype=torch.float16):
                model(x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        with emulate():
            if watched:
                with watch(model):
                    step()
            else:
                step()
        return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])

    before = (torch.amp.GradScaler.step, torch.autograd.backward, nn.utils.clip_grad_norm_)
    assert torch.equal(weights(True), weights(False))
    assert before == (torch.amp.GradScaler.step, torch.autograd.backward, nn.utils.clip_grad_norm_)


def test_a_loop_that_would_go_on_for_ever_is_ended_after_the_steps_that_were_asked_for() -> None:
    def train() -> None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            try:
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
            except Exception:
                continue

    assert examine(train, num_steps=3).num_steps == 3


def test_an_optimizer_that_calls_the_loss_itself_is_watched_too() -> None:
    def train() -> None:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.randn(16, 8)).float().square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)

    seen = examine(train, num_steps=3)
    assert (seen.used_half, seen.num_steps, diagnose(seen)) == ({torch.bfloat16}, 3, [])


def test_optimizers_that_share_a_scaler_and_accumulated_steps_are_no_misuse() -> None:
    def train() -> None:
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(3):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                for _ in range(2):
                    with torch.autocast("cpu", dtype=torch.float16):
                        loss = model(torch.randn(16, 8)).float().square().mean() / 2
                    scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()

    assert diagnose(examine(train, num_steps=6)) == []


def test_updates_that_bf16_parameters_lose_are_found_with_their_share() -> None:
    """Steps of 1e-3 on weights of 1 are a quarter of BF16's last place below 1: none changes a norm's weight."""

    def train() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16)).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(16, 8).bfloat16()).float().square().mean().backward()
            optimizer.step()

    seen = examine(train, num_steps=4)
    assert seen.updates["1.weight"].share == 1.0
    finding = next(found for found in diagnose(seen) if found.name == "lost updates")
    assert finding.unit in ("0", "1")
    assert "in bfloat16" in finding.seen
    assert not any("GradScaler" in found.why for found in diagnose(seen))


def test_fp32_parameters_lose_no_updates() -> None:
    assert examine(training(right), num_steps=6).updates == {}


class Positions(nn.Module):
    """Embeds positions by a layer; `last` is the largest of them."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 8)
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(torch.arange(self.last + 1.0)[-4:, None])


@pytest.mark.parametrize(
    ("last", "dtype", "found"), [(300, "bfloat16", True), (255, "bfloat16", False), (300, "float16", False)]
)
def test_positions_that_a_cast_rounds_are_found(last: int, dtype: str, found: bool) -> None:
    def train() -> None:
        model = Positions(last)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=getattr(torch, dtype)):
                loss = model(torch.randn(4, 8)).float().square().mean()
            loss.backward()
            optimizer.step()

    with emulate():
        findings = [each for each in diagnose(examine(train, num_steps=2)) if each.name == "rounded positions"]
    assert [(each.unit, each.seen.split(",")[1].strip()) for each in findings] == ([("layer", "297")] if found else [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA its own autocast is used")
@pytest.mark.parametrize("older", [False, True], ids=["torch.amp", "torch.cuda.amp"])
def test_a_loop_that_names_cuda_is_watched_in_half_where_there_is_none(older: bool) -> None:
    dtypes: list[torch.dtype] = []
    enabled: list[bool] = []

    def train() -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the older spelling is deprecated
            scaler = torch.cuda.amp.GradScaler() if older else torch.amp.GradScaler("cuda", init_scale=1024.0)
            contexts = [torch.cuda.amp.autocast() if older else torch.autocast("cuda") for _ in range(9)]
        enabled.append(scaler.is_enabled())
        for context in contexts:
            with context:
                output = model(torch.randn(4, 8))
                dtypes.append(output.dtype)
                loss = output.float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    seen = examine(train, num_steps=4)
    assert seen.error == ""
    assert enabled == [True]
    assert set(dtypes) == {torch.float16}
    assert seen.num_steps == 4
    assert torch.amp.GradScaler("cpu").is_enabled()

"""The largest half value of a forward pass: where it came up, and what does not count."""

from __future__ import annotations

import torch
from torch import nn

from autoprec import Policy, apply_policy, emulate
from autoprec.probes.headroom import LargestHalf, watch_headroom


class Scaled(nn.Module):
    """Multiplies inside its own code and divides again, so that no module's output shows how large it got."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor / self.factor


def watch(model: nn.Module, x: torch.Tensor, policy: Policy | None = None) -> LargestHalf:
    largest = LargestHalf()
    apply_policy(model, policy or Policy(default="fp16"))
    with emulate(), watch_headroom(model, largest):
        model(x).sum()
    return largest


def test_a_value_inside_a_module_counts_and_is_found_there() -> None:
    model = nn.Sequential(nn.Identity(), Scaled(3_000.0))
    largest = watch(model, torch.full((2, 4), -2.0))
    assert (largest.value, largest.module) == (6_000.0, "1")


def test_fp32_values_infinities_nans_and_the_largest_number_itself_do_not_count() -> None:
    x = torch.tensor([65_504.0, -65_504.0, float("inf"), float("-inf"), float("nan"), 8.0])
    assert watch(nn.Sequential(nn.Identity(), Scaled(1.0)), x).value == 8.0
    assert watch(nn.Sequential(Scaled(1e6)), torch.ones(2), Policy(default="fp32")).value == 0.0


def test_memory_that_is_not_written_yet_does_not_count() -> None:
    model, largest, x = nn.Sequential(nn.Dropout(0.5)).train(), LargestHalf(), torch.ones(64, 64).half()
    for _ in range(20):
        torch.full((64, 64), 60_000.0).half()  # freed at once: the next tensor of that size lies there
        with watch_headroom(model, largest):
            model(x)
    assert largest.value == 2.0


def test_the_backward_pass_does_not_count() -> None:
    model = apply_policy(nn.Sequential(nn.Linear(4, 4)), Policy(default="fp16"))
    largest = LargestHalf()
    with emulate(), watch_headroom(model, largest):
        loss = model(torch.ones(2, 4)).sum()
        forward = largest.value
        (loss * 30_000.0).backward()
    assert largest.value == forward
    assert forward < 10


def test_it_leaves_no_hook_behind() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    watch(model, torch.ones(2, 4))
    assert not model[0]._forward_hooks
    assert not torch.nn.modules.module._global_forward_hooks

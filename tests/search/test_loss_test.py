"""When an optimizer setting may leave its default."""

from __future__ import annotations

import numpy as np
import pytest

from autoprec.policy import Number
from autoprec.search.loss_test import lowers_loss
from autoprec.trials.outcome import Outcome


def outcome(losses: list[float], held_out: float | None) -> Outcome:
    number = None if held_out is None else Number(value=held_out, kind="emulated")
    return Outcome(kind="ok", train_losses=losses, eval_loss=number)


NOISE = np.random.default_rng(0).normal(0.0, 0.1, 28)
DEFAULT = outcome((2.0 + NOISE).tolist(), 1.0)


@pytest.mark.parametrize(
    ("shift", "held_out", "expected"),
    [(-0.2, 0.9, True), (-0.2, 1.0, False), (0.0, 0.9, False), (0.2, 0.9, False), (-0.2, None, False)],
    ids=["both lower", "held-out loss not lower", "training loss the same", "training loss higher", "no held-out loss"],
)
def test_both_losses_have_to_be_lower(shift: float, held_out: float | None, expected: bool) -> None:
    other = np.random.default_rng(1).normal(0.0, 0.1, 28)
    assert lowers_loss(outcome((2.0 + shift + NOISE + 0.1 * other).tolist(), held_out), DEFAULT) is expected


def test_few_steps_decide_nothing() -> None:
    assert not lowers_loss(outcome([1.0] * 10, 0.5), outcome([2.0] * 10, 1.0))

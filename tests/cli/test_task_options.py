"""The options of a task: what is said reaches the task, what is not said leaves it its own."""

from __future__ import annotations

from typing import Any

import pytest

from autoprec.cli.task_options import TaskOptions
from autoprec.policy import TrainingOptions


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({}, {}),
        ({"compile": True}, {"compile": "inductor"}),
        ({"compile_backend": "eager"}, {"compile": "eager"}),
        ({"tf32": False}, {"tf32": False}),
        ({"checkpoint": ["blocks.*", "stem"], "channels_last": True}, None),
        ({"accumulation_steps": 1, "optimizer_implementation": "fused"}, None),
    ],
    ids=str,
)
def test_only_what_is_said_becomes_a_training_option(said: dict[str, Any], wanted: dict[str, Any] | None) -> None:
    assert TaskOptions(**said).training_options() == (said if wanted is None else wanted)


def test_a_policys_options_are_those_of_its_task_unless_others_are_said() -> None:
    found = TrainingOptions(checkpoint=("0",), compile="eager", accumulation_steps=4)
    task = TaskOptions(model="mlp", accumulation_steps=2).build_task(found)
    assert (task.checkpoint, task.compile, task.accumulation_steps) == (["0"], "eager", 2)
    assert TaskOptions(model="mlp").build_task().compile is None

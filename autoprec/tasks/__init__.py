"""What is trained: the protocol, and tasks by name. `vision_task` loads torchvision when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoprec.tasks.protocol import Batch, TargetShape, Task
from autoprec.tasks.source import TaskSource

if TYPE_CHECKING:
    from autoprec.tasks.vision import vision_task

__all__ = ["Batch", "TargetShape", "Task", "TaskSource", "vision_task"]


def __getattr__(name: str) -> Any:
    if name == "vision_task":
        from autoprec.tasks.vision import vision_task

        return vision_task
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

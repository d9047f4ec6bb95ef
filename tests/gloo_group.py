"""What one of the two processes of the fixture `run_in_two` does; a module of its own, so that it pickles by name."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def be_one(rank: int, store: str, answer: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        answer.send(("ok", function(rank, *args)))
        dist.destroy_process_group()
    except BaseException:
        answer.send(("error", traceback.format_exc()))

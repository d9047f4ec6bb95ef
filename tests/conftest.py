"""What tests of several rooms share: a function run by two processes of one gloo group."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

RunInTwo = Callable[..., list[Any]]


@pytest.fixture
def run_in_two(tmp_path: Path) -> RunInTwo:
    """`run_in_two(function, *args)` calls `function(rank, *args)` in two processes that are one gloo group.

    The function stands at the top of its module; what it returns must pickle. An error in either is an error here.
    """
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")

    def run(function: Callable[..., Any], *args: Any) -> list[Any]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["autoprec.trials.preload"])
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        ranks = [
            context.Process(target=_be_one, args=(rank, str(tmp_path / "store"), pipes[rank][1], function, args))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        answers = [pipe[0].recv() if pipe[0].poll(120) else ("error", "no answer within 120 s") for pipe in pipes]
        for rank in ranks:
            rank.join(10)
            rank.kill()
        errors = [f"process {rank}: {what}" for rank, (kind, what) in enumerate(answers) if kind == "error"]
        assert not errors, "\n".join(errors)
        return [result for _, result in answers]

    return run


def _be_one(rank: int, store: str, answer: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        answer.send(("ok", function(rank, *args)))
        dist.destroy_process_group()
    except BaseException:
        answer.send(("error", traceback.format_exc()))

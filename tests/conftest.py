"""What tests of several rooms share: a function run by two processes of one gloo group."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from gloo_group import be_one

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
            context.Process(target=be_one, args=(rank, str(tmp_path / "store"), pipes[rank][1], function, args))
            for rank in range(2)
        ]
        for rank, (_, write_end) in zip(ranks, pipes, strict=True):
            rank.start()
            write_end.close()  # a process that ends without an answer is the end of its pipe
        answers = [_answer(read_end) for read_end, _ in pipes]
        for rank in ranks:
            rank.join(10)
            rank.kill()
        errors = [f"process {rank}: {what}" for rank, (kind, what) in enumerate(answers) if kind == "error"]
        assert not errors, "\n".join(errors)
        return [result for _, result in answers]

    return run


def _answer(pipe: Connection) -> tuple[str, Any]:
    if not pipe.poll(120):
        return "error", "no answer within 120 s"
    try:
        answer: tuple[str, Any] = pipe.recv()
    except EOFError:
        return "error", "it ended without an answer"
    return answer

"""A trial on several GPUs, seen from one of its processes: its share of the batches, and what the group agrees on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autoprec.errors import StudyError
from autoprec.policy import Policy, content_hash
from autoprec.tasks.protocol import Batch
from autoprec.trials.outcome import TrialSettings

__all__ = ["Replicas", "open_replicas"]


@dataclass(frozen=True, slots=True)
class Replicas:
    """The processes that train one model in step by DistributedDataParallel; with `size` 1 nothing is done."""

    rank: int = 0
    size: int = 1

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model to call in training: gradients are averaged over the group in its backward pass.

        Apply the policy first. Parameters without a gradient are allowed; gradients take no memory twice.
        """
        if self.size == 1:
            return model
        return DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=True)

    def own(self, draw: Callable[[], Batch]) -> Batch:
        """Draw a batch for each process and return this one's: the group trains on all of them in one step."""
        if self.size == 1:
            return draw()
        return [draw() for _ in range(self.size)][self.rank]

    def mean(self, value: float, device: torch.device) -> float:
        """Return the mean over the group; one that is not finite makes it not finite for all, in step."""
        if self.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return float(total) / self.size

    def check_policy(self, policy: Policy) -> None:
        """Refuse to train where a process has another policy.

        Raises:
            StudyError: the hashes differ.
        """
        if self.size == 1:
            return
        found: list[str | None] = [None] * self.size
        dist.all_gather_object(found, content_hash(policy.to_json()))
        if len(set(found)) > 1:
            raise StudyError(f"the processes of one trial have different policies: {', '.join(map(str, found))}")


def open_replicas(settings: TrialSettings) -> Replicas:
    """Return this process's place in the group that the settings ask for.

    Raises:
        StudyError: a group is asked for, and this process is in none of that size.
    """
    if settings.num_processes == 1:
        return Replicas()
    if not dist.is_initialized() or dist.get_world_size() != settings.num_processes:
        raise StudyError(
            f"a trial of {settings.num_processes} processes is started by `Worker.run`, as a torchrun child"
        )
    return Replicas(dist.get_rank(), dist.get_world_size())

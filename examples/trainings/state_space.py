"""A selective state-space model, as Mamba is built: the running mean of a noisy sequence, token by token.

autoprec search --task examples/trainings/state_space.py:task
"""

import torch
import torch.nn.functional as F
from torch import nn

import autoprec


class SelectiveScan(nn.Module):
    """The recurrence by itself: exponentials, products of many steps and a sum over states."""

    def __init__(self, width: int, num_states: int) -> None:
        super().__init__()
        self.decay_log = nn.Parameter(torch.log(torch.arange(1.0, num_states + 1)).repeat(width, 1))
        self.skip = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor, steps: torch.Tensor, into: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        decay = torch.exp(steps[..., None] * -torch.exp(self.decay_log))
        given = (steps * x)[..., None] * into[:, :, None]
        state, states = torch.zeros_like(decay[:, 0]), []
        for place in range(x.size(1)):
            state = decay[:, place] * state + given[:, place]
            states.append(state)
        return (torch.stack(states, dim=1) * out[:, :, None]).sum(-1) + self.skip * x


class StateSpace(nn.Module):
    def __init__(self, width: int, num_states: int) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(1, 2 * width), nn.Linear(width, 1)
        self.conv = nn.Conv1d(width, width, 3, groups=width, padding=2)
        self.select = nn.Linear(width, 2 * num_states, bias=False)
        self.steps = nn.Linear(width, width)
        self.scan = SelectiveScan(width, num_states)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, gate = self.in_proj(x).chunk(2, dim=-1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : x.size(1)].transpose(1, 2))
        into, out = self.select(x).chunk(2, dim=-1)
        hidden = self.scan(x, F.softplus(self.steps(x)), into, out)
        return self.out_proj(hidden * F.silu(gate))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def weight_decay_by_rank(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2
    )


def task(width: int = 16, num_states: int = 4, length: int = 32, batch_size: int = 32) -> autoprec.Task:
    noisy = torch.randn(16, batch_size, length, 1) + torch.randn(16, batch_size, 1, 1)
    means = noisy.cumsum(2) / torch.arange(1, length + 1)[:, None]
    batches = list(zip(noisy, means, strict=True))
    return autoprec.Task(
        name="state_space",
        model=lambda: StateSpace(width, num_states),
        train_batches=batches[4:],
        eval_batches=batches[:4],
        loss=loss,
        optimizer=weight_decay_by_rank,
        max_grad_norm=1.0,
    )

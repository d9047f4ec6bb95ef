"""Run by two processes: DDP and FSDP2 under a policy, on gloo. `python distributed_checks.py RANK FILE`."""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from autoprec import Policy, apply_policy, build_grad_scaler, emulate, remove_policy

POLICY = Policy(default="fp32", modules={"0": "fp16", "2": "bf16", "3": "autocast"}, dtype="bf16")


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), nn.Linear(8, 4))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def reference_gradients() -> list[torch.Tensor]:
    """The mean over both ranks' batches, in one process."""
    model = apply_policy(make(), POLICY)
    for rank in range(2):
        (model(batch(rank)).square().sum() / 2).backward()
    return [p.grad for p in model.parameters()]


def check_ddp(rank: int) -> None:
    model = DistributedDataParallel(apply_policy(make(), POLICY))
    model(batch(rank)).square().sum().backward()
    for found, expected in zip(model.parameters(), reference_gradients(), strict=True):
        torch.testing.assert_close(found.grad, expected, rtol=1e-3, atol=1e-3)


def check_scaler(rank: int) -> None:
    """An overflow on one rank alone skips the step on both, and both scales fall together."""
    model = DistributedDataParallel(apply_policy(make(), POLICY))
    scaler = build_grad_scaler(POLICY, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy([p.detach() for p in model.parameters()])
    for step in range(2):
        loss = model(batch(rank)).square().sum()
        scaler.scale(loss * (float("inf") if step == 0 and rank == 1 else 1e-3)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert moved == (step == 1), (rank, step)
        assert scaler.get_scale() == 32768.0
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(both, weights)
    assert torch.equal(both[0], both[1])


def check_fsdp(rank: int, *, apply_first: bool) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = make()
    if apply_first:
        apply_policy(model, POLICY)
    for child in (model[0], model[2], model[3]):
        fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not apply_first:
        apply_policy(model, POLICY)
    model(batch(rank)).square().sum().backward()
    for found, expected in zip(model.parameters(), reference_gradients(), strict=True):
        assert found.dtype == found.grad.dtype == torch.float32
        torch.testing.assert_close(found.grad.full_tensor(), expected, rtol=1e-3, atol=1e-3)
    remove_policy(model)
    model(batch(rank))


def check_fsdp_of_a_half_tree(rank: int) -> None:
    """One half region whose children are sharded on their own."""
    mesh = init_device_mesh("cpu", (2,))
    policy = Policy(default="fp16")
    model, plain = apply_policy(make(), policy), apply_policy(make(), policy)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[2][0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    for index in range(2):
        (plain(batch(index)).square().sum() / 2).backward()
    model(batch(rank)).square().sum().backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad, rtol=1e-3, atol=1e-3)


def main() -> None:
    rank, path = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    with emulate():
        check_ddp(rank)
        check_scaler(rank)
        check_fsdp(rank, apply_first=True)
        check_fsdp(rank, apply_first=False)
        check_fsdp_of_a_half_tree(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

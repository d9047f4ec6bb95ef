"""ZeroRedundancyOptimizer under a policy: two processes train what one does, and hold half of the states each."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import digits_training
import pytest
import torch
from digits_training import (
    CLIP,
    COMPUTED,
    LR,
    NUM_STEPS,
    micro_batches,
    network,
    train_in_halves,
    train_share,
    watching,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from autoprec import Policy, apply_policy, build_grad_scaler, emulate
from autoprec.errors import ApplyError, PrecisionWarning
from autoprec.integrations.zero import build_zero_optimizer
from autoprec.policy import GradScalerSettings
from autoprec.training import TrainingStep

HALFWAY = 50
POLICY = digits_training.POLICY.replace(grad_scaler=GradScalerSettings(init_scale=2.0**10, growth_interval=40))
"""No gradient of a half batch overflows, so that the steps are those of the whole batch."""


class Replica:
    """One process's share of a training by DDP with a sharded optimizer."""

    def __init__(self, policy: Policy = POLICY) -> None:
        self.model = apply_policy(network(), policy)
        self.replica = DistributedDataParallel(self.model)
        self.optimizer = build_zero_optimizer(policy, torch.optim.Adam, self.model.parameters(), lr=LR)
        self.scaler = build_grad_scaler(policy, device="cpu")
        self.step = TrainingStep(self.optimizer, grad_scaler=self.scaler, max_grad_norm=CLIP)

    def train(self, rank: int, first: int, last: int) -> list[float]:
        return train_share(self.replica, self.step, rank=rank, first=first, last=last)

    def state(self) -> list[dict[str, Any]]:
        """The whole state, on each process: a consolidation gives it to one of them."""
        found = {}
        for rank in range(2):
            self.optimizer.consolidate_state_dict(to=rank)
            if rank == torch.distributed.get_rank():
                found = self.optimizer.state_dict()
        return copy.deepcopy([self.model.state_dict(), found, self.scaler.state_dict()])

    def load(self, state: list[dict[str, Any]]) -> None:
        for part, saved in zip((self.model, self.optimizer, self.scaler), state, strict=True):
            part.load_state_dict(saved)


def _train_and_resume(rank: int) -> dict[str, Any]:
    with emulate():
        run = Replica()
        losses = run.train(rank, 0, HALFWAY)
        state = run.state()
        losses += run.train(rank, HALFWAY, NUM_STEPS)
        resumed = Replica()
        resumed.load(state)
        again = resumed.train(rank, HALFWAY, NUM_STEPS)
        with watching(run.model) as computed:
            run.model(next(iter(micro_batches(1)))[0])
    pairs = zip(run.model.parameters(), resumed.model.parameters(), strict=True)
    return {
        "losses": losses,
        "again": again,
        "same": all(torch.equal(one, other) for one, other in pairs),
        "computed": computed,
        "settings": {key: run.optimizer.optim.param_groups[0][key] for key in ("eps", "amsgrad", "lr")},
        "num_states": len(run.optimizer.optim.state),
    }


def test_two_processes_train_what_one_does_and_a_resumed_run_ends_the_same(run_in_two: Any) -> None:
    answers = run_in_two(_train_and_resume)
    plain = train_in_halves(POLICY)
    for answer in answers:
        assert len(answer["losses"]) == NUM_STEPS == 110
        assert answer["losses"] == pytest.approx(plain, abs=1e-3)
        assert answer["again"] == answer["losses"][HALFWAY:]
        assert answer["same"]
        assert answer["computed"] == COMPUTED
        assert answer["settings"] == {"eps": 1e-6, "amsgrad": True, "lr": LR}
    assert sum(answer["num_states"] for answer in answers) == len(list(network().parameters()))
    assert min(answer["num_states"] for answer in answers) > 0


def _load_and_refuse(rank: int) -> dict[str, Any]:
    with emulate():
        plain = Replica(POLICY.replace(optimizer=None))
        plain.train(rank, 0, 2)
        state = plain.state()
        run = Replica()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.load(state)
            run.train(rank, 2, 4)
    told = [str(each.message) for each in caught if each.category is PrecisionWarning]
    sharded = network()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    refused = []
    for parameters, optimizer, settings in (
        (sharded.parameters(), torch.optim.Adam, {}),
        (network().half().parameters(), torch.optim.Adam, {}),
        (network().parameters(), torch.optim.LBFGS, {}),
        (network().parameters(), torch.optim.Adam, {"overlap_with_ddp": True}),
    ):
        with pytest.raises(ApplyError) as error:
            build_zero_optimizer(POLICY, optimizer, parameters, **settings)
        refused.append(str(error.value))
    own = build_zero_optimizer(POLICY, torch.optim.Adam, [{"params": list(network().parameters()), "eps": 1e-6}])
    group = run.optimizer.optim.param_groups[0]
    return {"told": told, "eps": group["eps"], "amsgrad": group["amsgrad"], "refused": refused, "own": own.kept}


def test_a_loaded_state_keeps_the_policys_settings_and_wrong_settings_are_errors(run_in_two: Any) -> None:
    for answer in run_in_two(_load_and_refuse):
        assert answer["told"] == ["kept the policy's optimizer settings: eps 1e-08 -> 1e-06, amsgrad False -> True"]
        assert (answer["eps"], answer["amsgrad"]) == (1e-6, True)
        assert answer["own"] == [{"eps": 1e-6, "amsgrad": True}]
        for message, part in zip(
            answer["refused"],
            (
                "sharded by fully_shard",
                "must be FP32 masters",
                "LBFGS evaluates the loss in a closure",
                "overlap_with_ddp",
            ),
            strict=True,
        ):
            assert part in message


def test_without_a_process_group_it_says_what_is_missing() -> None:
    with pytest.raises(ApplyError, match="there is none; init_process_group"):
        build_zero_optimizer(POLICY, torch.optim.Adam, network().parameters())

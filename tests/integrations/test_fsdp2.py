"""FSDP2 with a mixed-precision policy a unit: two processes train what one trains under the applied policy."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from digits_training import COMPUTED, LR, NUM_STEPS, Network, micro_batches, network, train_in_halves, train_share
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from autoprec import Policy, apply_policy, build_grad_scaler, build_optimizer, emulate
from autoprec.errors import ApplyError
from autoprec.integrations.fsdp2 import describe_units, plan_units, shard_model
from autoprec.policy import GradScalerSettings
from autoprec.probes.dtypes import watch_dtypes
from autoprec.training import TrainingStep

RULES = {"stem": "fp16", "norm": "fp32", "blocks": "fp16", "head": "bf16"}
POLICY = Policy(
    default="fp32",
    dtype="fp16",
    modules=RULES,
    grad_scaler=GradScalerSettings(init_scale=2.0**10, growth_interval=40),
    optimizer={"eps": 1e-6, "amsgrad": True},
)
ARITHMETIC = ("convolution", "native_layer_norm", "addmm", "mm")
"""What the units compute with; FSDP2's own copies run in their names, too."""
HALFWAY = 50


class Sharded:
    """One process's share of a training under FSDP2."""

    def __init__(self, policy: Policy = POLICY) -> None:
        self.model = shard_model(network(), policy, mesh=init_device_mesh("cpu", (2,)))
        self.optimizer = build_optimizer(policy, torch.optim.Adam, self.model.parameters(), lr=LR)
        self.scaler = build_grad_scaler(policy, device="cpu")
        self.step = TrainingStep(self.optimizer, grad_scaler=self.scaler)

    def train(self, rank: int, first: int, last: int) -> list[float]:
        return train_share(self.model, self.step, rank=rank, first=first, last=last)

    def state(self) -> bytes:
        file = io.BytesIO()
        parts = (self.model, self.optimizer, self.scaler)
        torch.save([part.state_dict() for part in parts], file)
        return file.getvalue()

    def load(self, state: bytes) -> None:
        parts = (self.model, self.optimizer, self.scaler)
        for part, saved in zip(parts, torch.load(io.BytesIO(state), weights_only=False), strict=True):
            part.load_state_dict(saved)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.full_tensor().detach().clone() for name, p in self.model.named_parameters()}


def _train_and_resume(rank: int) -> dict[str, Any]:
    with emulate():
        run = Sharded()
        losses = run.train(rank, 0, HALFWAY)
        state = run.state()
        losses += run.train(rank, HALFWAY, NUM_STEPS)
        resumed = Sharded()
        resumed.load(state)
        again = resumed.train(rank, HALFWAY, NUM_STEPS)
        own, other = run.weights(), resumed.weights()
        with watch_dtypes(run.model) as log:
            run.model(next(iter(micro_batches(1)))[0])
        computed = {
            name: {d for op in log[name].operators if op.name in ARITHMETIC for d in op.inputs | op.outputs}
            for name in COMPUTED
        }
    return {
        "losses": losses,
        "again": again,
        "same": all(torch.equal(own[name], other[name]) for name in own),
        "computed": computed,
        "masters": {str(p.dtype) for p in run.model.parameters()},
        "scale": run.scaler.get_scale(),
    }


def test_two_processes_train_what_one_does_and_a_resumed_run_ends_the_same(run_in_two: Any) -> None:
    answers = run_in_two(_train_and_resume)
    plain = train_in_halves(POLICY, clip=None)
    for answer in answers:
        assert len(answer["losses"]) == NUM_STEPS == 110
        assert answer["losses"] == pytest.approx(plain, abs=1e-3)
        assert answer["again"] == answer["losses"][HALFWAY:]
        assert answer["same"]
        assert answer["computed"] == COMPUTED
        assert answer["masters"] == {"torch.float32"}
    assert answers[0]["losses"] == answers[1]["losses"]
    assert [answer["scale"] for answer in answers] == [2.0**12, 2.0**12]


def _clip_once(rank: int) -> dict[str, float]:
    """One step of SGD at a rate of 1: how far the weights went is the norm of the clipped gradient."""
    with emulate():
        model = shard_model(network(), Policy(default="fp32"), mesh=init_device_mesh("cpu", (2,)))
        before = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
        step = TrainingStep(torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=0.25)
        images, labels = next(iter(micro_batches(1)))
        result = step(F.cross_entropy(model(images[rank * 8 : rank * 8 + 8]), labels[rank * 8 : rank * 8 + 8]))
        moved = [p.full_tensor().detach() - before[name] for name, p in model.named_parameters()]
    assert result is not None
    assert result.grad_norm is not None
    return {"norm": result.grad_norm, "moved": float(nn.utils.get_total_norm(moved))}


def test_the_norm_and_the_clipping_of_sharded_gradients_are_those_of_the_whole(run_in_two: Any) -> None:
    model = network()
    images, labels = next(iter(micro_batches(1)))
    F.cross_entropy(model(images), labels).backward()
    norm = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    assert norm > 0.25
    for answer in run_in_two(_clip_once):
        assert answer == pytest.approx({"norm": norm, "moved": 0.25}, rel=1e-4)


def _refusals(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    messages = []

    def refused(function: Any) -> None:
        with pytest.raises(ApplyError) as caught:
            function()
        messages.append(str(caught.value))

    sharded = shard_model(network(), POLICY, mesh=mesh)
    refused(lambda: shard_model(sharded, POLICY, mesh=mesh))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        refused(lambda: sharded(torch.zeros(2, 1, 8, 8)))
    own = network()
    fully_shard(own.head, mesh=mesh)
    refused(lambda: shard_model(own, POLICY, mesh=mesh))
    return messages


def test_a_second_precision_or_a_second_sharding_is_an_error(run_in_two: Any) -> None:
    for messages in run_in_two(_refusals):
        assert "sharded already: the model itself, stem" in messages[0]
        assert "torch.autocast is on around a model" in messages[1]
        assert "sharded already: head" in messages[2]


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.head = nn.Linear(8, 2)
        self.tied = nn.Linear(8, 2)
        self.tied.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x)).flatten(1))


@pytest.mark.parametrize(
    ("model", "policy", "message"),
    [
        (
            Network,
            Policy(default="autocast"),
            "the model itself, stem, norm, blocks.0, blocks.1, blocks.2, head: autocast",
        ),
        (Network, Policy(default="fp32", modules={"blocks": "autocast"}), "blocks.0, blocks.1, blocks.2: autocast"),
        (Buffered, Policy(default="fp16"), "norm: half precision with floating buffers"),
        (
            Buffered,
            Policy(default="fp16", modules={"norm": "fp32"}),
            "head and tied: a weight tied across units that are sharded apart",
        ),
        (Network, Policy(default="fp32", modules={"stemm": "fp16"}), "match no module"),
        (lambda: network().half(), Policy(default="fp16"), "must be FP32 masters"),
        (lambda: apply_policy(network(), POLICY), POLICY, "has a policy already"),
        (lambda: torch.compile(network(), backend="eager"), POLICY, "wrapped in OptimizedModule"),
    ],
    ids=["autocast", "autocast blocks", "buffers", "tied", "rule", "masters", "applied", "compiled"],
)
def test_what_fsdp2_cannot_express_is_refused_by_name(model: Any, policy: Policy, message: str) -> None:
    with pytest.raises(ApplyError, match=message):
        plan_units(model(), policy)


def test_units_that_match_nothing_and_a_precision_of_ones_own_are_refused() -> None:
    with pytest.raises(ApplyError, match="units: 'bloks' matches no module with a forward of its own; nearest: blocks"):
        plan_units(network(), POLICY, units=["bloks"])
    with pytest.raises(ApplyError, match="mp_policy was given beside a policy"):
        shard_model(network(), POLICY, mp_policy=None)


def test_units_are_the_parts_where_precisions_meet_and_whole_modules_elsewhere() -> None:
    found = [(unit.name, unit.precision) for unit in plan_units(network(), POLICY)]
    assert found == [("stem", "fp16"), ("norm", "fp32"), ("blocks", "fp16"), ("head", "bf16"), ("", "fp32")]
    found = [(unit.name, unit.precision) for unit in plan_units(network(), Policy(default="bf16"), units=["blocks.?"])]
    assert found == [("blocks.0", "bf16"), ("blocks.1", "bf16"), ("blocks.2", "bf16"), ("", "bf16")]


def test_the_data_of_an_export_are_the_arguments_of_each_mixed_precision_policy() -> None:
    data = json.loads(describe_units(network(), POLICY).text)
    assert list(data) == ["stem", "norm", "blocks", "head", ""]
    half = {"param_dtype": "float16", "reduce_dtype": "float32", "output_dtype": "float16", "cast_forward_inputs": True}
    assert data["stem"] == half
    assert data[""] == {**half, "param_dtype": "float32", "output_dtype": "float32"}

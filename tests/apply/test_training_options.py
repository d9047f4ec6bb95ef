"""Training options of a model: exact gradients of checkpointing, in the policy's precisions; names; warnings."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.apply import (
    apply_policy,
    apply_training_options,
    build_optimizer,
    checkpoint_modules,
    read_structure,
    remove_checkpointing,
    remove_policy,
    suspend_policy,
)
from autoprec.apply.checkpointing import matched_modules
from autoprec.emulation import emulate
from autoprec.errors import ApplyError, PolicyError, PrecisionWarning
from autoprec.policy import Policy, Precision, TrainingOptions

EMULATED = False  # where it matters the tests do; torch.compile does nothing under emulation


class Block(nn.Module):
    """A residual block with a parameter of its own, a norm and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.5)
        self.gain = nn.Parameter(torch.ones(width))
        self.num_calls = 0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.num_calls += 1
        return x + self.gain * scale * self.dropout(self.linear(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.tail = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.tail(x)


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    with emulate():
        model(torch.randn(4, 6)).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


POLICIES: dict[str, Policy] = {
    "fp32": Policy(default="fp32"),
    "autocast": Policy(default="autocast"),
    "fp16": Policy(default="fp16"),
    "bf16": Policy(default="bf16"),
    "mixed": Policy(default="autocast", modules={"blocks.1": "fp16", "blocks.*.norm": "fp32", "tail.0": "bf16"}),
}


class TestGradients:
    @pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
    @pytest.mark.parametrize("first", ["checkpointing", "policy"])
    def test_they_equal_those_without_checkpointing_bit_for_bit(self, policy: Policy, first: str) -> None:
        wanted = gradients(apply_policy(build(), policy))
        model = build()
        if first == "checkpointing":
            checkpoint_modules(model, ["blocks.*", "tail"])
            apply_policy(model, policy)
        else:
            apply_policy(model, policy)
            checkpoint_modules(model, ["blocks.*", "tail"])
        assert_equal(gradients(model), wanted)
        assert [block.num_calls for block in model.blocks] == [2, 2, 2]

    def test_a_suspended_and_a_removed_policy_leave_the_checkpointing(self) -> None:
        bare = gradients(build())
        model = build()
        checkpoint_modules(model, ["blocks.*"])
        apply_policy(model, Policy(default="fp16"))
        with suspend_policy(model):
            assert_equal(gradients(model), bare)
        assert not torch.equal(gradients(model)["stem.weight"], bare["stem.weight"])
        remove_policy(model)
        assert_equal(gradients(model), bare)
        assert model.blocks[0].num_calls == 6

    def test_a_copy_and_a_pickle_run_their_own_weights(self) -> None:
        model = build()
        checkpoint_modules(model, ["blocks.*"])
        apply_policy(model, Policy(default="fp16"))
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with torch.no_grad():
                other.blocks[0].linear.weight.zero_()
            assert not torch.equal(gradients(other)["stem.weight"], gradients(model)["stem.weight"])

    def test_without_gradients_nothing_is_computed_twice(self) -> None:
        model = build()
        checkpoint_modules(model, ["blocks.*"])
        with torch.no_grad():
            model(torch.randn(4, 6))
        assert model.blocks[0].num_calls == 1

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own look at what it traces
    def test_compiled_it_equals_eager(self) -> None:
        model = build().eval()
        checkpoint_modules(model, ["blocks.*"])
        x = torch.randn(4, 6)
        model(x).sum().backward()
        wanted = model.stem.weight.grad
        assert wanted is not None
        model.zero_grad()
        torch.compile(model, backend="aot_eager")(x).sum().backward()
        torch.compiler.reset()
        assert model.stem.weight.grad is not None
        assert torch.allclose(model.stem.weight.grad, wanted, rtol=1e-5, atol=1e-6)


class TestNames:
    @pytest.mark.parametrize(
        ("names", "wanted"),
        [
            (["blocks.*"], ["blocks.0", "blocks.1", "blocks.2"]),
            (["blocks.0", "tail"], ["blocks.0", "tail"]),
            (["tail", "tail.0"], ["tail"]),
            (["*.linear"], ["blocks.0.linear", "blocks.1.linear", "blocks.2.linear"]),
            ([], []),
        ],
    )
    def test_outermost_matches_count(self, names: list[str], wanted: list[str]) -> None:
        model = build()
        before = list(model.state_dict())
        assert checkpoint_modules(model, names) == wanted
        assert list(model.state_dict()) == before
        remove_checkpointing(model)
        assert all("forward" not in vars(module) for module in model.modules())

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (["block.0"], "checkpoint 'block.0' matches no module of this model; nearest: blocks.0"),
            (["blocks.9*"], r"checkpoint 'blocks\.9\*' matches no module"),
            (["blocks"], r"checkpoint 'blocks' \(ModuleList\) is never called itself; 'blocks\.\*' means its parts"),
            (["stem", "nothing"], "checkpoint 'nothing' matches no module"),
        ],
    )
    def test_a_name_that_cannot_be_checkpointed_is_refused_and_the_model_left_alone(
        self, names: list[str], message: str
    ) -> None:
        model = build()
        with pytest.raises(ApplyError, match=message):
            checkpoint_modules(model, names)
        assert all("forward" not in vars(module) for module in model.modules())

    def test_a_part_of_attention_is_computed_by_it(self) -> None:
        model = nn.Sequential(nn.MultiheadAttention(4, 1))
        with pytest.raises(ApplyError, match=r"'0\.out_proj' .* never called itself; name '0'"):
            matched_modules(read_structure(model), ["0.out_proj"])


class TestPolicy:
    def test_options_survive_a_file_and_are_left_out_where_there_are_none(self) -> None:
        options = TrainingOptions(
            accumulation_steps=4,
            checkpoint=("blocks.*",),
            channels_last=True,
            tf32=False,
            optimizer_implementation="fused",
            compile="inductor",
        )
        policy = Policy(training=options)
        assert Policy.from_json(policy.to_json()) == policy
        assert hash(policy.training) == hash(options)
        assert '"training"' not in Policy().to_json()
        assert TrainingOptions().changed == {}
        assert TrainingOptions(tf32=False, checkpoint=("a",)).changed == {"tf32": False, "checkpoint": ("a",)}

    @pytest.mark.parametrize(
        ("training", "message"),
        [
            ('{"chekpoint": []}', r"\$\.training\.chekpoint: unknown key.*nearest: checkpoint"),
            (
                '{"optimizer_implementation": "fuse"}',
                r"found 'fuse'; allowed: foreach, fused, for-loop; nearest: fused",
            ),
            ('{"accumulation_steps": 0}', r"\$\.training\.accumulation_steps: found 0"),
            ('{"channels_last": "yes"}', r"\$\.training\.channels_last: found 'yes'"),
            ('{"checkpoint": [""]}', r"\$\.training\.checkpoint: '' is not a module name or glob"),
            ('{"checkpoint": "blocks"}', r"\$\.training\.checkpoint: found 'blocks'"),
        ],
    )
    def test_a_wrong_option_says_where_and_what_is_allowed(self, training: str, message: str) -> None:
        with pytest.raises(PolicyError, match=message):
            Policy.from_json(f'{{"schema_version": 1, "training": {training}}}')

    def test_the_optimizer_gets_the_implementation(self) -> None:
        policy = Policy(training=TrainingOptions(optimizer_implementation="fused"))
        optimizer = build_optimizer(policy, torch.optim.AdamW, build().parameters())
        assert optimizer.param_groups[0]["fused"] is True
        with pytest.warns(PrecisionWarning, match="LBFGS has no fused"):
            build_optimizer(policy, torch.optim.LBFGS, build().parameters())


@pytest.fixture
def tf32() -> Iterator[None]:
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    before = [switch.fp32_precision for switch in switches]
    yield
    for switch, value in zip(switches, before, strict=True):
        switch.fp32_precision = value


class TestWarnings:
    def images(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))

    def policy(self, **options: Any) -> Policy:
        default: Precision = "fp32"
        return Policy(default=default, training=TrainingOptions(**options))

    def test_applying_without_the_options_lists_what_is_missing(self) -> None:
        policy = self.policy(checkpoint=("0",), channels_last=True, accumulation_steps=2)
        with pytest.warns(PrecisionWarning, match="found with checkpointing of 0; channels_last weights, which"):
            apply_policy(self.images(), policy)

    @pytest.mark.usefixtures("tf32")
    def test_with_the_options_nothing_is_said(self) -> None:
        policy = self.policy(checkpoint=("0",), channels_last=True, tf32=True)
        model = apply_training_options(self.images(), policy)
        apply_policy(model, policy)
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.backends.cudnn.conv.fp32_precision == "tf32"

    def test_another_model_without_those_modules_is_told_not_refused(self) -> None:
        with pytest.warns(PrecisionWarning, match="checkpointing of blocks"):
            apply_policy(self.images(), self.policy(checkpoint=("blocks.*",)))

    def test_training_eagerly_under_a_policy_found_compiled_warns_once_and_compiled_never(self) -> None:
        model = apply_policy(self.images(), self.policy(compile="eager"))
        x = torch.randn(2, 3, 8, 8)
        with torch.no_grad():
            model(x)
        with pytest.warns(PrecisionWarning, match=r"torch\.compile\(model, backend='eager'\)"):
            model(x)
        model(x)
        other = apply_policy(self.images(), self.policy(compile="eager"))
        with warnings.catch_warnings():
            warnings.simplefilter("error", PrecisionWarning)
            torch.compile(other, backend="eager", fullgraph=True)(x)
        torch.compiler.reset()

"""torch.compile, torch.export, torch.jit.trace and torch.fx on models with a policy, with torch's own kernels."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from apply_models import EXAMPLES, Attentive, Example, Net
from torch import fx, nn

from autoprec import Policy, apply_policy, remove_policy
from autoprec.errors import ApplyError
from autoprec.probes.dtypes import watch_dtypes

EMULATED = False
BF16_EXAMPLES = {name: e for name, e in EXAMPLES.items() if "fp16" not in e.policy.precisions}


@pytest.mark.parametrize("example", BF16_EXAMPLES.values(), ids=BF16_EXAMPLES.keys())
def test_an_export_computes_the_same(example: Example) -> None:
    model = apply_policy(example.model(), example.policy).eval()
    exported = torch.export.export(model, (example.batch(),)).module()
    assert torch.equal(exported(example.batch()), model(example.batch()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed", "attention"])
def test_aot_compilation_gives_the_same_gradients(name: str) -> None:
    example = EXAMPLES[name]
    policy = example.policy.replace(modules={k: v.replace("fp16", "bf16") for k, v in example.policy.modules.items()})
    torch._dynamo.reset()
    gradients = []
    for compiled in (False, True):
        model = apply_policy(example.model(), policy)
        call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        call(example.batch()).square().sum().backward()
        gradients.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, rtol=2e-2, atol=2e-2)


def test_c17_two_policies_in_one_process_are_two_graphs() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    seen: list[Any] = []
    batch = torch.randn(2, 4)
    for dtype in ("bf16", "fp32", "bf16"):
        modules = {"0": dtype, "1": "fp32"}
        apply_policy(model, Policy(default="fp32", modules=modules))
        eager = model(batch)
        seen.append(compiled(batch))
        assert torch.equal(seen[-1], eager)
        remove_policy(model)
        assert torch.equal(compiled(batch), model(batch))
    assert not torch.equal(seen[0], seen[1])
    assert not torch.is_autocast_enabled("cpu")


def test_a_compiled_evaluation_does_not_take_the_fused_path() -> None:
    torch._dynamo.reset()
    model = apply_policy(Attentive(), Policy(default="autocast", dtype="bf16")).eval()
    batch = torch.randn(6, 8)
    with torch.no_grad():
        eager = model(batch)
        assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(batch), eager)
    assert torch.backends.mha.get_fastpath_enabled()


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x) * 1000, labels)


def test_a_loss_inside_a_half_model_compiles() -> None:
    torch._dynamo.reset()
    model = apply_policy(WithLoss(), Policy(default="bf16"))
    batch, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(batch, labels), model(batch, labels))


def test_an_ignored_in_place_result_compiles() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            self.act(x)
            return x

    torch._dynamo.reset()
    model = apply_policy(InPlace(), Policy(default="fp32", modules={"act": "bf16"}))
    batch = torch.tensor([-1.0, 2.0])
    assert model(batch).tolist() == [0.0, 4.0]
    assert torch.compile(model, fullgraph=True, backend="eager")(batch).tolist() == [0.0, 4.0]


def test_a_traced_graph_takes_a_policy_and_a_policy_is_not_traced() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.last = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.last(self.inner(x))

    model = Block()
    policy = Policy(default="autocast", dtype="bf16", modules={"inner.0": "fp32"})
    graph = apply_policy(fx.symbolic_trace(copy.deepcopy(model)), policy)
    apply_policy(model, policy)
    batch = torch.randn(2, 4)
    with watch_dtypes(graph) as log:
        assert torch.equal(graph(batch), model(batch))
    assert log["last"].computed == {torch.bfloat16}
    assert log["inner.0"].computed == {torch.float32}
    with pytest.raises(ApplyError, match=r"torch\.fx cannot trace a model with a policy"):
        fx.Tracer.trace(_EveryModule(), nn.Sequential(model))


class _EveryModule(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


def test_a_jit_trace_keeps_the_precisions() -> None:
    model = apply_policy(Net().eval(), Policy(default="fp32", modules={"blocks.0": "bf16"}))
    batch = torch.randn(6, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch.jit.trace itself
        traced = torch.jit.trace(model, batch, check_trace=False)
    assert torch.equal(traced(batch), model(batch))

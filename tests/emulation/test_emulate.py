"""`emulate()`: what it covers of a training step, what it leaves behind, and how contexts combine."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autoprec.emulation import cuda_autocast_rules, emulate, is_emulating

HALF, SINGLE = torch.float16, torch.float32


class WeightCasts(TorchDispatchMode):
    """Count the casts to half of tensors with one shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and tuple(args[0].shape) == self.shape:
            self.count += (kwargs or {}).get("dtype") is HALF
        return func(*args, **(kwargs or {}))


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.dtypes.add(args[-1].dtype)
        return func(*args, **(kwargs or {}))


def test_is_emulating_follows_the_contexts() -> None:
    assert not is_emulating()
    with emulate():
        with emulate(arithmetic=False):
            assert is_emulating()
        assert is_emulating()
    assert not is_emulating()
    with cuda_autocast_rules():
        assert not is_emulating()


def test_an_exception_ends_the_emulation() -> None:
    with pytest.raises(ZeroDivisionError), emulate():
        raise ZeroDivisionError
    assert not is_emulating()
    with torch.autocast("cpu", HALF):
        assert torch.ones(2, dtype=HALF).exp().dtype is HALF


def test_emulate_can_decorate_a_function() -> None:
    @emulate()
    def inside() -> bool:
        return is_emulating()

    assert inside()
    assert inside()
    assert not is_emulating()


def test_each_part_can_be_switched_off() -> None:
    h = torch.ones(3, 3, dtype=HALF)
    with Products() as below:
        with emulate(gpu_rules=False), torch.autocast("cpu", HALF):
            h @ h
            assert (h.exp().dtype, below.dtypes) == (HALF, {SINGLE})
        below.dtypes.clear()
        with emulate(arithmetic=False), torch.autocast("cpu", HALF):
            h @ h
            assert (h.exp().dtype, below.dtypes) == (SINGLE, {HALF})


def test_nothing_is_printed_or_warned(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            with emulate(), torch.autocast("cpu", HALF):
                nn.Linear(2, 2)(torch.ones(1, 2)).softmax(-1)
    assert capfd.readouterr() == ("", "")


def test_rules_reach_other_threads_and_end_with_the_last_context() -> None:
    inside, leave = threading.Event(), threading.Event()
    seen: list[Any] = []

    def other() -> None:
        with emulate():
            inside.set()
            leave.wait(10)
            with torch.autocast("cpu", HALF):
                seen.append(torch.ones(2, dtype=HALF).exp().dtype)

    thread = threading.Thread(target=other)
    with emulate(arithmetic=False):
        thread.start()
        assert inside.wait(10)
    assert not is_emulating()
    leave.set()
    thread.join(10)
    assert seen == [SINGLE]
    with torch.autocast("cpu", HALF):
        assert torch.ones(2, dtype=HALF).exp().dtype is HALF


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        return y, torch.softmax(y, -1)


def traced() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(Scripted(), torch.ones(2, 4))


def results(model: Callable[..., Any], *inputs: torch.Tensor) -> list[torch.dtype]:
    found = model(*inputs)
    flat = [
        f
        for item in (found if isinstance(found, tuple) else (found,))
        for f in (item if isinstance(item, tuple) else (item,))
    ]
    return [f.dtype for f in flat if f is not None]


X = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
PARTS: dict[str, tuple[Callable[[], Callable[..., Any]], tuple[torch.Tensor, ...], list[torch.dtype]]] = {
    "linear": (lambda: nn.Linear(4, 4), (X,), [HALF]),
    "layer_norm": (lambda: nn.LayerNorm(4), (X,), [SINGLE]),
    "group_norm": (lambda: nn.GroupNorm(1, 3), (X,), [SINGLE]),
    "batch_norm": (lambda: nn.BatchNorm1d(3), (X.half(),), [HALF]),
    "method": (lambda: lambda x: x.softmax(-1), (X.half(),), [SINGLE]),
    "power_of_two": (lambda: lambda x: 2**x, (X.half(),), [SINGLE]),
    "cross_entropy": (lambda: F.cross_entropy, (X[0].half(), torch.tensor([0, 1, 2])), [SINGLE]),
    "embedding": (lambda: nn.Embedding(4, 4), (torch.tensor([1, 2]),), [SINGLE]),
    "attention": (lambda: nn.MultiheadAttention(4, 2), (X, X, X), [HALF, SINGLE]),
    "attention_in_eval": (lambda: nn.MultiheadAttention(4, 2).eval(), (X, X, X), [HALF, SINGLE]),
    "encoder_layer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (X,), [SINGLE]),
    "encoder_layer_in_eval": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(), (X,), [SINGLE]),
    "lstm": (lambda: nn.LSTM(4, 5, bidirectional=True), (X,), [HALF, HALF, HALF]),
    "gru": (lambda: nn.GRU(4, 5), (X,), [HALF, HALF]),
    "rnn": (lambda: nn.RNN(4, 5), (X,), [HALF, HALF]),
    "lstm_cell": (lambda: nn.LSTMCell(4, 5), (X[0],), [HALF, HALF]),
    "gru_cell": (lambda: nn.GRUCell(4, 5), (X[0],), [HALF]),
    "traced": (traced, (X,), [HALF, SINGLE]),
    "padded_convolution": (lambda: nn.Conv1d(3, 2, 3, padding="same"), (X,), [HALF]),
    "prelu": (lambda: nn.PReLU(), (X,), [HALF]),
    "mse_loss": (lambda: F.mse_loss, (X.half(), X.half()), [SINGLE]),
}


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("part", PARTS)
def test_modules_give_the_dtypes_of_cuda_autocast(part: str, grad: bool) -> None:
    make, inputs, expected = PARTS[part]
    model = make()
    with torch.set_grad_enabled(grad), emulate(), torch.autocast("cpu", HALF):
        assert results(model, *inputs) == expected


NO_FAKE = {"lstm", "gru", "rnn", "gru_cell", "traced"}  # cuDNN's layers ask for a driver, a trace holds real tensors


@pytest.mark.parametrize("part", [part for part in PARTS if part not in NO_FAKE])
def test_the_dtypes_of_modules_are_those_of_torch_s_own_cuda_kernels(part: str, real_cuda_autocast: Any) -> None:
    make, inputs, expected = PARTS[part]
    with real_cuda_autocast():
        assert results(make(), *(torch.zeros(i.shape, dtype=i.dtype) for i in inputs)) == expected


def test_fake_tensors_follow_the_rules() -> None:
    with FakeTensorMode(), cuda_autocast_rules():
        encoder, lstm = nn.TransformerEncoderLayer(4, 2, 8), nn.LSTM(4, 5)
        with torch.autocast("cpu", HALF):
            outputs = encoder(torch.empty(3, 2, 4)), lstm(torch.empty(3, 2, 4))[0]
        assert [output.dtype for output in outputs] == [SINGLE, HALF]
        sum(output.float().sum() for output in outputs).backward()
        assert {p.grad.dtype for p in [*encoder.parameters(), *lstm.parameters()] if p.grad is not None} == {SINGLE}


def test_gradients_of_functional_calls_are_emulated() -> None:
    model, x = nn.Linear(4, 1), torch.randn(3, 4)

    def loss(parameters: dict[str, torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", HALF):
            return torch.func.functional_call(model, parameters, (batch,)).float().sum()

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    with emulate():
        whole = torch.func.grad(loss)(parameters, x)
        single = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    torch.testing.assert_close(single["weight"].sum(0), whole["weight"], rtol=2e-3, atol=2e-3)


def test_a_traced_module_trains_step_after_step() -> None:
    model = traced()
    for _ in range(4):
        with emulate():
            with torch.autocast("cpu", HALF):
                _, probabilities = model(torch.ones(2, 4))
            probabilities[:, 0].sum().backward()
    assert model.linear.weight.grad is not None
    assert bool(model.linear.weight.grad.any())


def test_packed_sequences_keep_their_lengths() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 4), torch.tensor([3, 1]))
    with emulate(), torch.autocast("cpu", HALF):
        output, (hidden, cell) = nn.LSTM(4, 5)(packed)
    assert (output.data.dtype, hidden.dtype, cell.dtype) == (HALF, HALF, HALF)
    assert output.batch_sizes.tolist() == [2, 1, 1]


def test_recurrent_weights_get_fp32_gradients() -> None:
    lstm = nn.LSTM(4, 5)
    with emulate():
        with torch.autocast("cpu", HALF):
            output, _ = lstm(X)
        output.float().sum().backward()
    assert {p.grad.dtype for p in lstm.parameters() if p.grad is not None} == {SINGLE}
    assert all(p.grad is not None for p in lstm.parameters())


CACHED = {
    "einsum": lambda w: torch.einsum("ij,jk->ik", torch.ones(2, 4), w),
    "mv": lambda w: torch.mv(w, torch.ones(6)),
    "chain_matmul": lambda w: torch.linalg.multi_dot([torch.ones(2, 4), w, torch.ones(6, 2)]),
    "linear": lambda w: F.linear(torch.ones(2, 6), w),
    "mm": lambda w: torch.ones(2, 4) @ w,
}


@pytest.mark.parametrize("name", CACHED)
def test_a_trainable_weight_is_cast_once_in_an_outermost_region(name: str) -> None:
    use = CACHED[name]
    weight = nn.Parameter(torch.ones(4, 6))
    with emulate(), WeightCasts(4, 6) as casts:
        with torch.autocast("cpu", HALF):
            use(weight)
            with torch.autocast("cpu", HALF):
                use(weight)
            use(weight)
        assert casts.count == 1
        with torch.autocast("cpu", HALF):
            use(weight)
        assert casts.count == 2
        with torch.autocast("cpu", HALF, cache_enabled=False):
            use(weight)
            use(weight)
        assert casts.count == 4


@pytest.mark.parametrize("name", CACHED)
def test_a_frozen_weight_is_cast_at_each_use(name: str) -> None:
    with emulate(), WeightCasts(4, 6) as casts, torch.autocast("cpu", HALF):
        for _ in range(3):
            CACHED[name](torch.ones(4, 6))
    assert casts.count == 3


@pytest.mark.parametrize("name", CACHED)
def test_a_weight_changed_between_regions_is_cast_anew(name: str) -> None:
    weight = nn.Parameter(torch.ones(4, 6))
    with emulate():
        with torch.autocast("cpu", HALF):
            before = CACHED[name](weight)
        with torch.no_grad():
            weight.mul_(2)
        with torch.autocast("cpu", HALF):
            assert torch.equal(CACHED[name](weight), 2 * before)
            with torch.no_grad():
                weight.mul_(2)
            assert torch.equal(CACHED[name](weight), 2 * before)
            torch.clear_autocast_cache()
            assert torch.equal(CACHED[name](weight), 4 * before)


@pytest.mark.parametrize("name", CACHED)
def test_evaluation_inside_a_region_does_not_cost_the_gradient(name: str) -> None:
    weight = nn.Parameter(torch.ones(4, 6))
    with emulate():
        with torch.autocast("cpu", HALF):
            with torch.no_grad():
                CACHED[name](weight)
            output = CACHED[name](weight)
        output.float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is SINGLE


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.einsum("bi,bi->bi", self.norm(self.first(x)), self.first(x)))


def gradients(run: Callable[[nn.Module, torch.Tensor], torch.Tensor], cache_enabled: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(3, 4, requires_grad=True)
    with torch.autocast("cpu", HALF, cache_enabled=cache_enabled):
        output = run(block, x)
    output.float().sum().backward()
    return [p.grad for p in block.parameters() if p.grad is not None] + [x.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non_reentrant"])
def test_recomputation_gives_the_same_gradients(reentrant: bool) -> None:
    with emulate():
        plain = gradients(lambda block, x: block(x), cache_enabled=True)
        again = gradients(lambda block, x: checkpoint(block, x, use_reentrant=reentrant), cache_enabled=True)
    assert len(plain) == len(again) == 7
    for value, reference in zip(again, plain, strict=True):
        assert torch.equal(value, reference)


def test_backward_and_recomputation_are_computed_in_fp32() -> None:
    with Products() as products, emulate():
        gradients(lambda block, x: checkpoint(block, x, use_reentrant=False), cache_enabled=True)
    assert products.dtypes == {SINGLE}


def test_compiled_models_run_eagerly_and_leave_no_graph_behind() -> None:
    model = Scripted()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with emulate(), torch.autocast("cpu", HALF):
        assert results(compiled, torch.ones(2, 4)) == [HALF, SINGLE]
    with torch.autocast("cpu", HALF):
        outside = results(compiled, torch.ones(2, 4))
        assert outside == results(model, torch.ones(2, 4))
    with emulate(arithmetic=False), torch.autocast("cpu", HALF):
        assert results(compiled, torch.ones(2, 4)) == [HALF, SINGLE]
    torch.compiler.reset()


def test_the_fused_attention_path_is_given_back() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    with emulate():
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled() is before


def test_the_grad_scaler_skips_a_step_that_overflowed_and_backs_off() -> None:
    layer = nn.Linear(4, 1, bias=False)
    nn.init.ones_(layer.weight)
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=1.0), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    with emulate():
        for _ in range(2):
            with torch.autocast("cpu", HALF):
                loss = layer(torch.ones(1, 4)).sum()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() == 2.0**15 and layer.weight[0, 0].item() == 1.0:
                first = layer.weight.detach().clone()
    assert torch.equal(first, torch.ones(1, 4))
    assert scaler.get_scale() == 2.0**15
    assert torch.equal(layer.weight.detach(), torch.zeros(1, 4))


def test_a_forward_that_overflows_half_gives_inf_and_not_in_fp32() -> None:
    wide = nn.Linear(2048, 1, bias=False)
    nn.init.ones_(wide.weight)
    x = torch.full((1, 2048), 60.0)
    with emulate():
        with torch.autocast("cpu", HALF):
            assert wide(x).item() == float("inf")
        with torch.autocast("cpu", torch.bfloat16):
            assert wide(x).item() == 122880.0
        assert wide(x).item() == 122880.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nested_tensors_go_through_untouched(dtype: torch.dtype) -> None:
    code = f"""
import torch, autoprec
from torch import nn
torch.manual_seed(0)
layer = nn.Linear(4, 2).to(torch.{str(dtype).removeprefix("torch.")})
parts = [torch.randn(3, 4, dtype=layer.weight.dtype), torch.randn(5, 4, dtype=layer.weight.dtype)]
nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
expected = layer(torch.cat(parts))
with autoprec.emulate():
    found = layer(nested).values()
    with torch.autocast("cpu", dtype=torch.float16):
        assert layer(nested).dtype == torch.float16
print(bool(torch.allclose(found, expected, atol=1e-2)))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout.strip() == "True", ended.stderr[-400:]

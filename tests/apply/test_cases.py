"""Reported situations with their right values: what models are made of and what is done to them."""

from __future__ import annotations

import copy
import io
import warnings
from collections import OrderedDict, UserDict, deque
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint

from autoprec import Policy, apply_policy, emulate, remove_policy
from autoprec.apply import checkpoint_modules
from autoprec.apply.state import num_regions_entered, num_weight_casts
from autoprec.errors import ApplyError, PrecisionWarning
from autoprec.policy import Precision
from autoprec.probes.dtypes import watch_dtypes

HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32


class Calls(nn.Module):
    """A module around a function, with submodules as keywords."""

    def __init__(self, function: Any, **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


# C01: layers that are owned but never called


@pytest.mark.parametrize("precision", ["fp16", "bf16", "autocast", "fp32"])
@pytest.mark.parametrize("training", [True, False])
def test_c01_attention_computes_as_a_whole_in_its_precision(precision: Any, training: bool) -> None:
    model = Calls(lambda m, x: m.attention(x, x, x)[0], attention=nn.MultiheadAttention(8, 2, batch_first=True))
    apply_policy(model.train(training), Policy(default="fp32", modules={"attention": precision}))
    products = {"mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_dot_product_flash_attention_for_cpu"}
    with torch.set_grad_enabled(training), watch_dtypes(model) as log:
        assert model(torch.randn(2, 3, 8)).dtype == FULL
    heavy = [operator for operator in log["attention"].operators if operator.name in products]
    expected = {"fp16": HALF, "bf16": BFLOAT, "autocast": HALF, "fp32": FULL}[precision]
    assert heavy
    assert all(operator.inputs == {expected} for operator in heavy)


def test_c01_a_part_of_attention_has_no_precision_of_its_own() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    with pytest.raises(
        ApplyError, match=r"'attention\.out_proj' is computed by 'attention' .* name 'attention' instead"
    ):
        apply_policy(model, Policy(modules={"attention.out_proj": "fp32"}))


def test_c01_a_layer_that_is_read_or_called_by_forward_computes_in_its_parents_half() -> None:
    model = Calls(
        lambda m, x: F.linear(m.called.forward(x), m.read.weight, m.several[0]),
        called=nn.Linear(4, 4),
        read=nn.Linear(4, 4),
        several=nn.ParameterList([torch.zeros(4)]),
    )
    apply_policy(model, Policy(default="fp16"))
    with watch_dtypes(model) as log:
        model(torch.randn(2, 4)).sum().backward()
    assert log.below("") == {HALF}
    assert model.several[0].grad.tolist() == [2.0, 2.0, 2.0, 2.0]
    assert model.read.weight.grad.dtype == FULL


# C04: one module under two names


def two_names() -> nn.Module:
    layer = nn.Linear(4, 4)
    return Calls(lambda m, x: m.tied(m.l(x)), l=layer, tied=layer)


def test_c04_one_module_under_two_names_takes_one_precision() -> None:
    model = two_names()
    assert len(model.state_dict()) == 4
    with pytest.raises(ApplyError, match=r"'l' \(fp16\) and 'tied' \(fp32\) are one module"):
        apply_policy(model, Policy(modules={"l": "fp16", "tied": "fp32"}))
    apply_policy(model, Policy(default="fp32", modules={"tied": "fp16"}))
    with watch_dtypes(model) as log:
        model(torch.ones(1, 4))
    assert log["l"].num_calls == 2
    assert log["l"].computed == {HALF}
    assert num_weight_casts() == 2
    assert num_regions_entered() == 3
    assert all("forward" not in module.__dict__ for module in remove_policy(model).modules())


def test_c04_tied_weights_take_one_precision() -> None:
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    with pytest.raises(ApplyError, match=r"'0\.weight' \(fp32\) and '1\.weight' \(fp16\) are one tied weight"):
        apply_policy(model, Policy(default="fp32", modules={"1": "fp16"}))
    apply_policy(model, Policy(default="fp16"))
    model(torch.tensor([1])).sum().backward()
    assert num_weight_casts() == 1


# C05: inputs of every kind


class Batch(NamedTuple):
    x: torch.Tensor
    ids: torch.Tensor


@dataclass
class Data:
    x: torch.Tensor
    name: str


class Pair(tuple):
    def __new__(cls, a: Any, b: Any) -> Any:
        return super().__new__(cls, (a, b))


class Output(OrderedDict):  # as model libraries return: a mapping whose items are attributes too
    def __init__(self, x: torch.Tensor) -> None:
        super().__init__(x=x)
        self.x = x


CONTAINERS = {
    "tuple": (lambda x: (x, 1), lambda v: v[0]),
    "own tuple": (lambda x: Pair(x, 1), lambda v: v[0]),
    "list": (lambda x: [x, None], lambda v: v[0]),
    "dict": (lambda x: {"a": x, "ids": torch.tensor([1])}, lambda v: v["a"]),
    "named tuple": (lambda x: Batch(x, torch.tensor([1])), lambda v: v.x),
    "dataclass": (lambda x: Data(x, "n"), lambda v: v.x),
    "namespace": (lambda x: SimpleNamespace(x=x, n=1), lambda v: v.x),
    "ordered dict": (lambda x: OrderedDict(a=x), lambda v: v["a"]),
    "user dict": (lambda x: UserDict(a=x), lambda v: v["a"]),
    "mapping proxy": (lambda x: MappingProxyType({"a": x}), lambda v: v["a"]),
    "deque": (lambda x: deque([x], maxlen=3), lambda v: v[0]),
    "model output": (lambda x: Output(x), lambda v: v.x),
    "nested": (lambda x: [{"a": (x,)}], lambda v: v[0]["a"][0]),
    "return type": (lambda x: torch.max(x, dim=-1, keepdim=True), lambda v: v.values),
}


@pytest.mark.parametrize(("wrap", "get"), CONTAINERS.values(), ids=CONTAINERS.keys())
def test_c05_containers_keep_their_class_inside_and_out(wrap: Any, get: Any) -> None:
    seen: list[Any] = []

    def look(module: nn.Module, value: Any, *, also: Any) -> Any:
        seen.extend((value, also))
        return value

    model = apply_policy(Calls(lambda m, v: m.inner(v, also=v), inner=Calls(look)), Policy(modules={"inner": "fp16"}))
    given = wrap(torch.ones(1, 4))
    returned = model(given)
    for inside in seen:
        assert type(inside) is type(given)
        assert get(inside).dtype == HALF
    assert type(returned) is type(given)
    assert get(returned).dtype == FULL
    assert get(given).dtype == FULL
    if isinstance(given, Output):
        assert returned["x"] is returned.x
    if isinstance(given, deque):
        assert returned.maxlen == 3


def test_c05_only_floating_tensors_of_32_bits_and_less_are_cast() -> None:
    seen: dict[str, Any] = {}
    model = Calls(lambda m, x, mask=None, *, state: seen.update(x=x, mask=mask, state=state))
    apply_policy(model, Policy(default="fp16"))
    given = {
        "a": torch.ones(1, 4),
        "ids": torch.tensor([1]),
        "double": torch.ones(1, dtype=torch.float64),
        "complex": torch.ones(1, dtype=torch.complex64),
        "bool": torch.tensor([True]),
        "text": "t",
        "number": 2.5,
    }
    model(given, state=(None, torch.tensor([True])))
    inside = seen["x"]
    assert inside["a"].dtype == HALF
    assert all(inside[key] is given[key] for key in given if key != "a")
    assert seen["mask"] is None
    assert seen["state"][0] is None


def test_c05_edits_of_the_callers_containers_and_tensors_are_not_lost() -> None:
    def edit(module: nn.Module, values: dict[str, Any], items: list[Any], x: torch.Tensor) -> None:
        values["new"] = values["a"] * 3
        values["b"] = torch.zeros(1)
        del values["gone"]
        items.append(torch.full((1,), 5.0))
        x.add_(1)

    model = apply_policy(Calls(lambda m, *v: m.inner(*v), inner=Calls(edit)), Policy(modules={"inner": "bf16"}))
    values = {"a": torch.ones(1), "b": torch.ones(1), "gone": torch.ones(1)}
    items, x, first = [torch.ones(1)], torch.ones(2), values["a"]
    model(values, items, x)
    assert sorted(values) == ["a", "b", "new"]
    assert values["a"] is first
    assert (values["new"].item(), values["b"].item(), items[1].item()) == (3.0, 0.0, 5.0)
    assert x.tolist() == [2.0, 2.0]


def test_c05_edits_of_attributes_reach_the_caller_and_one_object_stays_one() -> None:
    def edit(module: nn.Module, state: Any, data: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        state.new, state.x = state.x * 3, state.x + 1
        del state.gone
        data.x = data.x + 4
        x.add_(1)
        return y

    model = apply_policy(Calls(lambda m, *v: m.inner(*v), inner=Calls(edit)), Policy(modules={"inner": "bf16"}))
    state, data, x = SimpleNamespace(x=torch.ones(1), gone=1), Data(torch.ones(1), "n"), torch.ones(2)
    assert model(state, data, x, x).tolist() == [2.0, 2.0]
    assert x.tolist() == [2.0, 2.0]
    assert sorted(vars(state)) == ["new", "x"]
    assert (state.new.item(), state.x.item(), data.x.item()) == (3.0, 2.0, 5.0)


# C07: Embedding next to half layers


def test_c07_index_assignment_of_autocast_halves_fails_as_in_torch_and_passes_in_fp32() -> None:
    def assign(m: Any, ids: torch.Tensor) -> torch.Tensor:
        h = m.embedding(ids).clone()
        h[torch.tensor([True, False])] = m.linear(h)[:1]
        return h

    model = Calls(assign, embedding=nn.Embedding(4, 8), linear=nn.Linear(8, 8))
    ids = torch.tensor([1, 2])
    bare = model(ids)
    assert torch.equal(apply_policy(model, Policy(default="fp32"))(ids), bare)
    remove_policy(model)
    apply_policy(model, Policy(default="autocast"))
    with pytest.raises(RuntimeError, match="Index put requires the source and destination dtypes match"):
        model(ids)
    remove_policy(model)
    assert apply_policy(model, Policy(default="fp16"))(ids).dtype == FULL


# C08: losses


def test_c08_a_loss_after_the_model_is_fp32() -> None:
    model = apply_policy(nn.Sequential(nn.Identity()), Policy(default="fp16"))
    assert F.mse_loss(model(torch.full((4,), 300.0)), torch.zeros(4)).item() == 90000.0


LOSSES = {
    "functional": lambda m, x: F.mse_loss(x, torch.zeros_like(x)),
    "module": lambda m, x: m.loss(x, torch.zeros_like(x)),
    "helper": lambda m, x: helper(x),
    "in a part": lambda m, x: m.part(x),
    "with logits": lambda m, x: (helper(x), x)[0],
}


def helper(x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(x, torch.zeros_like(x))


class Part(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper(x)


class Losing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.MSELoss()
        self.part = Part()

    def forward(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        return LOSSES[kind](self, x) if kind != "functional" else F.mse_loss(x, torch.zeros_like(x))


@pytest.mark.parametrize("kind", ["functional", "module", "in a part"])
@pytest.mark.parametrize("precision", ["fp16", "autocast"])
def test_c08_a_loss_inside_the_forward_is_fp32(kind: str, precision: Any) -> None:
    model = apply_policy(Calls(lambda m, x: m.losing(x, kind), losing=Losing()), Policy(default=precision))
    assert model(torch.full((4,), 300.0)).item() == 90000.0
    assert model.eval()(torch.full((4,), 300.0)).item() == 90000.0


class Probable(nn.Module):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)
        self.loss = loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = torch.sigmoid(self.head(x))
        return self.loss(p, torch.ones_like(p)) if self.loss else F.binary_cross_entropy(p, torch.ones_like(p))


@pytest.mark.parametrize("loss", [nn.BCELoss(), None], ids=["BCELoss", "binary_cross_entropy"])
@pytest.mark.parametrize("precision", ["fp32", "autocast", "fp16"])
def test_c08_bce_on_probabilities_is_computed_in_fp32(loss: Any, precision: Any) -> None:
    torch.manual_seed(0)
    model = Probable(copy.copy(loss))
    batch = torch.randn(3, 4)
    bare = model(batch).item()
    assert apply_policy(model, Policy(default=precision))(batch).item() == pytest.approx(bare, rel=2e-3)


# C09: custom autograd functions


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


class Declared(Product):
    forward = staticmethod(torch.amp.custom_fwd(device_type="cpu", cast_inputs=FULL)(Product.forward))
    backward = staticmethod(torch.amp.custom_bwd(device_type="cpu")(Product.backward))


class Custom(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Linear(4, 4)
        self.w = nn.Parameter(torch.eye(4) * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(self.first(x), self.w)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_c09_a_custom_function_computes_in_its_module_and_its_gradient_is_right(precision: Any) -> None:
    torch.manual_seed(0)
    model, x = Custom(Product), torch.randn(3, 4)
    model(x).sum().backward()
    reference, model.w.grad = model.w.grad, None
    apply_policy(model, Policy(default=precision))(x).sum().backward()
    assert model.w.grad.dtype == FULL
    torch.testing.assert_close(model.w.grad, reference, rtol=1e-2, atol=1e-2)


def test_c09_under_autocast_a_plain_function_raises_and_a_declared_one_is_respected() -> None:
    model = apply_policy(Custom(Product), Policy(default="autocast"))
    with pytest.raises(RuntimeError, match="same dtype"):
        model(torch.randn(3, 4)).sum().backward()
    declared = apply_policy(Custom(Declared), Policy(default="autocast"))
    with watch_dtypes(declared) as log:
        declared(torch.randn(3, 4)).sum().backward()
    assert [o.inputs for o in log[""].operators if o.name in ("mm", "matmul")] == [{FULL}]
    assert declared.w.grad.dtype == FULL


# C10: FFT


@pytest.mark.parametrize("size", [192, 256])
@pytest.mark.parametrize("precision", ["autocast", "fp16"])
def test_c10_an_fp32_unit_around_an_fft_takes_every_size(size: int, precision: Any) -> None:
    model = Calls(
        lambda m, x: m.spectrum(m.conv(x)),
        conv=nn.Conv1d(1, 2, 3, padding=1),
        spectrum=Calls(lambda m, x: torch.fft.rfft(x).abs()),
    )
    apply_policy(model, Policy(default=precision, modules={"spectrum": "fp32"}))
    with watch_dtypes(model) as log:
        assert model(torch.randn(1, 1, size)).shape == (1, 2, size // 2 + 1)
    assert log["spectrum"].computed == {FULL}


# C12: recurrent layers and cells

RECURRENT = {
    "LSTM": lambda: nn.LSTM(4, 4, bidirectional=True, batch_first=True),
    "GRU": lambda: nn.GRU(4, 4, num_layers=2, batch_first=True),
    "RNN": lambda: nn.RNN(4, 4, batch_first=True),
    "projected LSTM": lambda: nn.LSTM(4, 4, proj_size=2, batch_first=True),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("make", RECURRENT.values(), ids=RECURRENT.keys())
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_c12_recurrent_layers_compute_in_half_and_carry_their_state(make: Any, precision: Any) -> None:
    torch.manual_seed(0)
    model = Calls(lambda m, x, state=None: m.rnn(x, state), rnn=make())
    x = torch.randn(2, 3, 4)
    reference, bare_state = model(x)
    apply_policy(model, Policy(default="fp32", modules={"rnn": precision}))
    output, state = model(x)
    again, _ = model(x, state)
    torch.testing.assert_close(output, reference, rtol=5e-2, atol=2e-2)
    assert output.dtype == again.dtype == FULL
    assert all(s.dtype == FULL for s in (state if isinstance(state, tuple) else (state,)))
    again.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == FULL for p in model.parameters())
    assert all(isinstance(w, nn.Parameter) for w in model.rnn._flat_weights)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x)[0], output)
    assert torch.equal(
        remove_policy(model)(x, bare_state)[0], copied.rnn.__class__.forward(model.rnn, x, bare_state)[0]
    )


def test_c12_a_packed_sequence_stays_one() -> None:
    model = apply_policy(
        Calls(lambda m, x: m.rnn(x)[0], rnn=nn.GRU(4, 4)), Policy(default="autocast", modules={"rnn": "fp16"})
    )
    output = model(pack_sequence([torch.randn(3, 4), torch.randn(1, 4)]))
    assert type(output) is PackedSequence
    assert output.data.dtype == FULL
    assert output.batch_sizes.tolist() == [2, 1, 1]


@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_c12_cells_with_bias_compute_in_half(make: Any) -> None:
    model = apply_policy(nn.Sequential(make(3, 3)), Policy(default="fp16"))
    with watch_dtypes(model) as log:
        model(torch.randn(2, 3))
    assert HALF in log["0"].computed


def test_c12_a_part_of_a_recurrent_layer_has_no_name() -> None:
    with pytest.raises(ApplyError, match="match no module"):
        apply_policy(nn.Sequential(nn.LSTM(3, 3)), Policy(modules={"0.weight_ih_l0": "fp16"}))


# C13: FP32 islands


def test_c13_an_fp32_layer_after_a_half_one_computes_fp32() -> None:
    model = apply_policy(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.PReLU()),
        Policy(modules={"0": "fp16", "1": "fp32", "2": "fp16"}),
    )
    with watch_dtypes(model) as log:
        model(torch.randn(2, 4)).sum().backward()
    assert log["0"].computed == {HALF}
    assert log["1"].computed == {FULL}
    assert log["2"].computed == {HALF}


def test_c13_in_place_residuals_pass_in_every_mixture() -> None:
    def residual(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.first(x)
        y = m.second(x)
        y += x
        return y

    for first in ("fp32", "fp16", "autocast", "bf16"):
        for second in ("fp32", "fp16", "autocast", "bf16"):
            model = Calls(residual, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
            policy = Policy(default="autocast", modules={"first": first, "second": second})
            model = apply_policy(model, policy)
            model(torch.randn(2, 4)).sum().backward()
            assert model.second.weight.grad is not None


def test_c13_an_alternating_chain_trains_like_fp32() -> None:
    torch.manual_seed(0)
    chain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)))
    other = copy.deepcopy(chain)
    apply_policy(chain, Policy(default="fp32", modules={str(i): "fp16" for i in range(0, 10, 2)}))
    batch = torch.randn(16, 8)
    for model in (chain, other):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(chain(batch), other(batch), rtol=1e-2, atol=1e-3)


def test_c13_an_ignored_in_place_result_reaches_the_caller() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        m.act(x)
        return x

    model = apply_policy(Calls(forward, act=nn.ReLU(inplace=True)), Policy(default="fp32", modules={"act": "fp16"}))
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    output = model(x)
    assert output.tolist() == [0.0, 4.0]
    output.sum().backward()
    assert x.grad.tolist() == [0.0, 2.0]


# C14: normalised and parametrised layers

NORMS = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(4),
    "BatchNorm without statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "InstanceNorm": lambda: nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Upsample(3), nn.InstanceNorm1d(4, affine=True)),
    "RMSNorm": lambda: nn.RMSNorm(4),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "old spectral_norm": lambda: torch.nn.utils.spectral_norm(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS.keys())
@pytest.mark.parametrize("precision", ["fp16", "bf16", "autocast"])
def test_c14_parameters_and_statistics_stay_fp32_and_finite(make: Any, precision: Any) -> None:
    torch.manual_seed(0)
    part = make()
    if isinstance(part, nn.SyncBatchNorm):
        part.eval()
    model = apply_policy(Calls(lambda m, x: m.part(x), part=part), Policy(default="fp32", modules={"part": precision}))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.randn(6, 4) * 1e3).sum() * 1e-3).backward()
        optimizer.step()
    tensors = [*model.parameters(), *model.buffers()]
    assert all(t.dtype == FULL and t.isfinite().all() for t in tensors if t.is_floating_point())
    assert all(p.grad is not None and p.grad.dtype == FULL for p in model.parameters())


def test_c14_batch_norm_statistics_are_those_of_the_half_input_in_fp32() -> None:
    batch = torch.randn(64, 4) * 1e4
    plain, under = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    plain(batch.half().float())
    apply_policy(nn.Sequential(under), Policy(default="fp16"))(batch)
    torch.testing.assert_close(under.running_mean, plain.running_mean, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(under.running_var, plain.running_var, rtol=1e-5, atol=1e-3)


class Counting(nn.Module):
    """Statistics of the user's own, written in several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.tensor([100_000.0]))
        self.register_buffer("read", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "in place":
            self.seen.add_(1)
        elif self.how == "assigned":
            self.seen = self.seen + 1
        elif self.how == "augmented":
            self.seen += 1
        elif self.how == "item":
            self.seen[0] = self.seen[0] + 1
        elif self.how == "alias":
            seen = self.seen.data
            seen.add_(1)
        elif self.how == "helper":
            add_one(self.seen)
        elif self.how == "out":
            torch.add(self.seen, 1, out=self.seen)
        elif self.how == "named":
            self.named("seen")
        return x * self.read

    def named(self, name: str) -> None:
        getattr(self, "seen").add_(1)  # noqa: B009


def add_one(tensor: torch.Tensor) -> None:
    tensor.add_(1)


@pytest.mark.parametrize("how", ["in place", "assigned", "augmented", "item", "alias", "helper", "out", "named"])
def test_c14_written_buffers_stay_fp32_and_exact_and_read_ones_are_cast(how: str) -> None:
    model = apply_policy(nn.Sequential(Counting(how)), Policy(default="fp16"))
    for _ in range(3):
        with watch_dtypes(model) as log:
            model(torch.ones(2, 4))
    assert model[0].seen.dtype == FULL
    assert model[0].seen.tolist() == [100_003.0]
    products = [operator for operator in log["0"].operators if operator.name == "mul"]
    assert [operator.inputs for operator in products] == [{HALF}]


def test_c14_a_write_that_cannot_be_read_from_the_code_is_kept_and_told() -> None:
    write = eval("lambda tensor: tensor.add_(1)")

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.tensor([10.0, 100_000.5]))
            self.writers = [write]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.writers[0](self.seen[:1])
            return x

    model = apply_policy(nn.Sequential(Hidden()), Policy(default="fp16"))
    with pytest.warns(PrecisionWarning, match="writes to its buffer 'seen'"):
        model(torch.ones(1))
    model(torch.ones(1))
    assert model[0].seen.tolist() == [12.0, 100_000.5]


class Standardized(nn.Linear):
    """Weight standardisation: what a batch norm takes as its input is not written to."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.weight.reshape(1, 4, -1)
        weight = F.batch_norm(rows, None, None, weight=self.gain * 0.5, training=True).reshape_as(self.weight)
        return F.linear(x, weight, self.bias)


def test_c14_a_weight_that_is_standardised_by_a_batch_norm_is_half_like_its_gain() -> None:
    model = apply_policy(nn.Sequential(Standardized()), Policy(default="fp16"))
    with emulate(), watch_dtypes(model) as log:
        model(torch.randn(2, 4)).sum().backward()
    norms = [operator for operator in log["0"].operators if "batch_norm" in operator.name]
    assert norms
    assert all(operator.inputs == {HALF} for operator in norms)
    assert model[0].gain.grad is not None


# C16: names


def test_c16_prefixes_of_wrappers_are_seen_through() -> None:
    for prefix in ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        apply_policy(model, Policy(default="fp32", modules={f"{prefix}0": "fp16"}))
        with watch_dtypes(model) as log:
            model(torch.ones(1, 2))
        assert (log["0"].computed, log["1"].computed) == ({HALF}, {FULL})


def test_c16_wrapped_models_take_the_names_of_the_bare_one() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for wrapped in (torch.compile(net, backend="eager"), nn.DataParallel(net)):
        apply_policy(wrapped, Policy(default="fp32", modules={"0": "fp16", "module.1": "fp16"}))
        assert "forward" in net[0].__dict__
        remove_policy(wrapped)
        assert "forward" not in net[0].__dict__


def test_c16_rules_that_match_nothing_are_listed_with_the_nearest_name() -> None:
    model = nn.ModuleDict({"layer1": nn.Linear(2, 2)})
    with pytest.raises(
        ApplyError, match=r"2 of the policy's rules match no module.*'layer9'; nearest: layer1, 'head\.\*'"
    ):
        apply_policy(model, Policy(modules={"layer9": "fp16", "head.*": "fp32"}))
    with pytest.warns(PrecisionWarning, match="match no module"):
        apply_policy(model, Policy(modules={"layer9": "fp16"}), strict=False)


# C18: copies


def test_c18_a_deep_copy_runs_its_own_weights() -> None:
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data.fill_(1.0)
    apply_policy(layer, Policy(default="fp16"))
    copied = copy.deepcopy(layer)
    copied.weight.data.fill_(9.0)
    assert copied(torch.ones(1, 2)).item() == 18.0
    assert layer(torch.ones(1, 2)).item() == 2.0


def test_c18_an_averaged_model_follows() -> None:
    model = apply_policy(nn.Linear(2, 1, bias=False), Policy(default="fp16"))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    model.weight.data.fill_(3.0)
    averaged.update_parameters(model)
    assert averaged(torch.ones(1, 2)).item() == 6.0


# C19: checkpointing


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "autocast"])
def test_c19_a_weight_shared_by_two_checkpointed_blocks(use_reentrant: bool, precision: Any) -> None:
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(m: Any, x: torch.Tensor, saves: bool) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(m.shared, x, use_reentrant=use_reentrant) if saves else m.shared(x)
        return x

    model = apply_policy(Calls(forward, shared=shared), Policy(default=precision, dtype="bf16"))
    gradients = []
    for saves in (False, True):
        model.zero_grad()
        model(torch.ones(2, 4, requires_grad=True), saves).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, saved in zip(*gradients, strict=True):
        torch.testing.assert_close(saved, plain, rtol=2e-2, atol=2e-2)


def test_c19_a_backward_inside_the_forward_recomputes_in_the_right_precision() -> None:
    seen: list[torch.dtype] = []

    def note(m: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype)
        return x * m.weight.weight

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(m.inner, x, use_reentrant=False).sum()
        (gradient,) = torch.autograd.grad(inner, x, create_graph=False)
        return gradient

    half = Calls(note, weight=nn.Linear(4, 4))
    model = apply_policy(
        Calls(forward, inner=half), Policy(default="autocast", dtype="bf16", modules={"inner": "fp16"})
    )
    model(torch.ones(4, 4, requires_grad=True))
    assert seen == [HALF, HALF]


# C20: lazy modules


def test_c20_lazy_modules_take_a_policy_before_their_first_forward() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2), nn.LazyBatchNorm1d())
    apply_policy(model, Policy(default="fp32", modules={"0": "fp16", "3": "bf16"}))
    for _ in range(2):
        with watch_dtypes(model) as log:
            model(torch.randn(3, 8)).sum().backward()
        assert HALF in log["0"].computed
    assert log["0"].computed == {HALF}
    assert type(model[0]) is nn.Linear
    assert all(p.dtype == FULL for p in model.parameters())


# C38 and C40: casts and memory


def test_c38_an_evaluation_in_the_users_autocast_leaves_the_gradients() -> None:
    for precision in ("autocast", "fp16"):
        model = apply_policy(nn.Sequential(nn.Linear(10, 20)), Policy(default=precision))
        with torch.autocast("cpu", dtype=torch.float16):
            with torch.no_grad():
                model(torch.randn(2, 10))
            model(torch.randn(2, 10)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


def test_c38_gradients_switched_on_inside_a_forward_without_them() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            m.layer(x).sum().backward()
        return x

    model = apply_policy(Calls(forward, layer=nn.Linear(4, 4)), Policy(default="fp16"))
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert model.layer.bias.grad.tolist() == [1.0] * 4


@pytest.mark.parametrize("frozen", [False, True])
def test_c40_a_shared_layer_is_cast_once_a_forward(frozen: bool) -> None:
    layer = nn.Linear(16, 16).requires_grad_(not frozen)
    model = apply_policy(Calls(lambda m, x: m.l(m.l(m.l(x))), l=layer), Policy(default="fp32", modules={"l": "fp16"}))
    with watch_dtypes(model) as log:
        model(torch.randn(2, 16))
    assert num_weight_casts() == 2
    casts = [o for unit in log.units.values() for o in unit.operators if o.name == "_to_copy" and o.outputs == {HALF}]
    assert len(casts) == 3
    assert log["l"].num_calls == 3


def test_c40_autocast_casts_of_trainable_weights_equal_their_number() -> None:
    layer = nn.Linear(16, 16)
    model = Calls(lambda m, x: m.other(m.l(m.full(m.l(x)))), l=layer, full=nn.Linear(16, 16), other=nn.Linear(16, 16))
    apply_policy(model, Policy(default="autocast", modules={"full": "fp32"}))
    with watch_dtypes(model) as log:
        model(torch.randn(2, 16))
    matrices = [
        o
        for n in ("l", "other")
        for o in log[n].operators
        if o.name == "_to_copy" and o.inputs == {FULL} and o.outputs == {HALF}
    ]
    num_inputs, num_weights = 2, 4
    assert len(matrices) == num_inputs + num_weights


def test_c40_memory_after_fifty_forwards_is_flat() -> None:
    import gc

    model = apply_policy(
        nn.Sequential(nn.Linear(8, 8), nn.GRU(8, 8), Calls(lambda m, x: x[0])),
        Policy(default="fp16", modules={"0": "autocast"}),
    )

    def live() -> int:
        gc.collect()
        return sum(type(item) is torch.Tensor for item in gc.get_objects())

    counts = []
    for index in range(52):
        model(torch.randn(3, 8)).sum().backward()
        if index in (1, 51):
            counts.append(live())
    assert counts[0] == counts[1]


# Masters (C29), memory format (C42), frozen parts


def test_c29_half_masters_are_listed_or_lifted_and_frozen_halves_may_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4).half(), nn.Linear(4, 4), nn.Linear(4, 4).bfloat16().requires_grad_(False))
    with pytest.raises(ApplyError, match=r"2 trainable parameters are not float32.*0\.weight, 0\.bias"):
        apply_policy(model, Policy())
    assert model[0].weight.dtype == HALF
    for default in ("autocast", "fp32", "fp16"):
        apply_policy(model, Policy(default=default), lift_half_parameters=True)
        assert [p.dtype for p in model.parameters()] == [FULL] * 4 + [BFLOAT] * 2
        model(torch.randn(2, 4)).sum().backward()
        assert model[0].weight.grad.dtype == FULL
        assert [p.requires_grad for p in model.parameters()] == [True] * 4 + [False] * 2
        remove_policy(model)


def test_c42_channels_last_is_kept() -> None:
    for precision in ("autocast", "fp16", "fp32"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
        model = apply_policy(
            model.to(memory_format=torch.channels_last), Policy(default=precision, modules={"3": "bf16"})
        )
        output = model(torch.randn(2, 3, 9, 9).contiguous(memory_format=torch.channels_last))
        assert output.is_contiguous(memory_format=torch.channels_last)
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


# What people do to models


def test_a_part_called_from_outside_computes_in_its_precision() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.encode(x))

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.encoder(x)

    for precision, dtype in (("autocast", HALF), ("fp16", HALF), ("bf16", BFLOAT), ("fp32", FULL)):
        model = apply_policy(Encoder(), Policy(default=precision))
        with watch_dtypes(model) as log:
            encoded = model.encode(torch.ones(1, 4))
        assert log["encoder.0"].computed == log["encoder.1"].computed == {dtype}
        assert encoded.dtype is FULL


@pytest.mark.parametrize("precision", ["autocast", "fp16"])
@pytest.mark.parametrize("container", [False, True], ids=["model", "ModuleDict"])
def test_a_loss_of_parts_called_from_outside_is_fp32(precision: Precision, container: bool) -> None:
    parts = {"maker": nn.Linear(1, 4, bias=False), "critic": nn.Linear(4, 1, bias=False)}
    model = nn.ModuleDict(parts)
    if not container:
        model, model.maker, model.critic = nn.Module(), parts["maker"], parts["critic"]
    nn.init.constant_(parts["maker"].weight, 1.0)
    nn.init.constant_(parts["critic"].weight, 75.0)
    apply_policy(model, Policy(default=precision))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        score = parts["critic"](parts["maker"](torch.ones(2, 1)))
    assert nn.functional.mse_loss(score, torch.zeros(2, 1)).item() == 90000.0  # in half: inf


def test_a_model_that_calls_itself_is_one_forward() -> None:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return self.layer(self(x, depth - 1)) if depth else x

    model = apply_policy(Tree(), Policy(default="fp16"))
    with watch_dtypes(model) as log:
        assert model(torch.ones(1, 4)).dtype == FULL
    assert log["layer"].inputs == {HALF}
    assert num_weight_casts() == 2


def test_weights_exchanged_inside_the_forward_are_the_ones_used() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        changed = {name: p * 0 + 2 for name, p in m.layer.named_parameters()}
        return m.layer(x) + 100 * torch.func.functional_call(m.layer, changed, (x,)) + m.layer(x)

    model = Calls(forward, layer=nn.Linear(2, 1, bias=False))
    model.layer.weight.data.fill_(1.0)
    for precision in ("fp16", "autocast"):
        apply_policy(model, Policy(default=precision))
        output = model(torch.ones(1, 2))
        assert output.item() == 2 + 400 + 2
        output.backward()
        assert model.layer.weight.grad.tolist() == [[2.0, 2.0]]
        model.zero_grad()
        remove_policy(model)


@pytest.mark.parametrize("how", ["in place", "data"])
def test_a_momentum_encoder_moved_inside_the_forward_computes_with_its_new_weights(how: str) -> None:
    @torch.no_grad()
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        for moved, leading in zip(m.follower.parameters(), m.leader.parameters(), strict=True):
            if how == "data":
                moved.data = moved.data * 0.5 + leading.data * 0.5
            else:
                moved.mul_(0.5).add_(leading, alpha=0.5)
        return m.follower(x)

    model = Calls(forward, leader=nn.Linear(2, 1, bias=False), follower=nn.Linear(2, 1, bias=False))
    model.leader.weight.data.fill_(3.0)
    model.follower.weight.data.fill_(1.0)
    apply_policy(model.requires_grad_(False), Policy(default="bf16"))
    assert [model(torch.ones(1, 2)).item() for _ in range(2)] == [4.0, 5.0]
    assert model.follower.weight.tolist() == [[2.5, 2.5]]


def test_a_sequence_changed_after_the_policy_runs_all_its_layers() -> None:
    model = apply_policy(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Policy(default="fp32", modules={"0": "fp16"}))
    model.append(nn.Linear(2, 5))
    assert model(torch.ones(1, 2)).shape == (1, 5)


def test_a_forward_of_the_users_own_is_wrapped_and_given_back() -> None:
    layer = nn.Linear(2, 2)
    own = lambda x: nn.Linear.forward(layer, x) * 0 + 7  # noqa: E731
    layer.forward = own
    model = nn.Sequential(layer)
    apply_policy(model, Policy(default="fp16"))
    assert model(torch.ones(1, 2)).tolist() == [[7.0, 7.0]]
    remove_policy(model)
    assert layer.forward is own


def test_an_inner_autocast_of_the_users_keeps_its_meaning() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return m.layer(x)

    model = apply_policy(Calls(forward, layer=nn.Linear(4, 4)), Policy(default="autocast"))
    with watch_dtypes(model) as log:
        model(torch.ones(1, 4))
    assert log["layer"].computed == {FULL}


def test_parallel_branches_in_threads_do_not_lock_up() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        def branch(layer: nn.Module) -> torch.Tensor:
            with emulate():
                return layer(x)

        with ThreadPoolExecutor(2) as pool:
            return sum(pool.map(branch, (m.a, m.b)))

    model = apply_policy(Calls(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), Policy(default="fp16"))
    assert model(torch.ones(1, 4)).dtype == FULL


def test_a_model_over_two_devices_runs_each_part_where_it_is() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.second(m.first(x).to("meta"))

    model = Calls(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 2, device="meta"))
    for precision in ("fp16", "autocast", "fp32"):
        apply_policy(model, Policy(default=precision, modules={"second": "bf16"}))
        output = model(torch.ones(1, 4))
        assert (output.device.type, output.dtype, tuple(output.shape)) == ("meta", FULL, (1, 2))
        remove_policy(model)


def test_old_weight_norm_casts_the_weight_it_computes() -> None:
    with pytest.warns(FutureWarning):
        layer = torch.nn.utils.weight_norm(nn.Linear(4, 4))
    model = apply_policy(nn.Sequential(layer, nn.Linear(4, 4)), Policy(default="fp16"))
    for _ in range(2):
        with watch_dtypes(model) as log:
            model(torch.ones(1, 4)).sum().backward()
    assert [o.inputs for o in log["0"].operators if o.name == "addmm"] == [{HALF}]
    assert layer.weight.dtype == FULL
    assert layer.weight_g.grad.dtype == FULL


def test_plain_tensor_attributes_are_cast_and_given_back() -> None:
    model = Calls(lambda m, x: x @ m.matrix)
    model.matrix = torch.eye(4)
    apply_policy(model, Policy(default="fp16"))
    with watch_dtypes(model) as log:
        model(torch.ones(1, 4))
    assert log[""].computed == {HALF}
    assert model.matrix.dtype == FULL


def test_a_whole_model_saved_with_its_policy_needs_no_source_of_it() -> None:
    model = apply_policy(nn.Sequential(nn.Linear(2, 2)), Policy(default="fp16"))
    model(torch.ones(1, 2))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_transformer_layers_in_evaluation_run_their_children_in_their_precisions() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    apply_policy(encoder, Policy(default="fp16", modules={"layers.1": "fp32", "layers.0.linear1": "bf16"}))
    mask = torch.tensor([[False, False, False], [False, False, True]])
    with torch.inference_mode(), watch_dtypes(encoder) as log:
        encoder(torch.randn(2, 3, 8), src_key_padding_mask=mask)
    assert BFLOAT in log["layers.0.linear1"].computed
    assert HALF in log["layers.0.linear2"].computed
    assert FULL in log["layers.1.linear2"].computed
    assert HALF not in log["layers.1.linear2"].computed


# Parameters that a forward writes to, and gradients that no cast has


class Renormalised(nn.Module):
    """As in models of EEG, CLIP and flows: the forward writes to its own parameters."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.scale = nn.Parameter(torch.tensor([7.0, 1.0009765625 + 2**-20]))
        self.linear = nn.Linear(2, 2)
        self.count = torch.tensor([1000.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.how == "data":
            self.scale.data.clamp_(0, 4.6052)
        elif self.how == "method":
            self.clamp()
        elif self.how == "assigned data":
            self.scale.data = self.scale.data.clamp(0, 4.6052)
        return self.linear(x) * self.scale

    def clamp(self) -> None:
        with torch.no_grad():
            self.scale.clamp_(0, 4.6052)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "autocast"])
@pytest.mark.parametrize("how", ["data", "method", "assigned data"])
def test_a_parameter_that_the_forward_writes_to_stays_fp32_and_exact(how: str, precision: Any) -> None:
    model = apply_policy(Renormalised(how), Policy(default=precision, dtype="bf16"))
    with watch_dtypes(model) as log:
        model(torch.ones(1, 2)).sum().backward()
    assert model.scale.tolist() == [torch.tensor(4.6052).item(), 1.0009765625 + 2**-20]
    assert log["linear"].computed == {HALF if precision == "fp16" else BFLOAT}
    assert model.count.tolist() == [1001.0]
    if how == "method" and precision != "fp16":
        torch._dynamo.reset()
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 2))
        assert model.count.tolist() == [1002.0]
        assert model.scale.dtype == FULL


@pytest.mark.parametrize("bag", [False, True])
@pytest.mark.parametrize("settings", [{"sparse": True}, {"max_norm": 0.5}], ids=["sparse", "max_norm"])
def test_embeddings_with_sparse_gradients_or_a_largest_norm_in_half(settings: dict[str, Any], bag: bool) -> None:
    table = (nn.EmbeddingBag if bag else nn.Embedding)(4, 8, **settings)
    model = apply_policy(nn.Sequential(table, nn.Linear(8, 2)), Policy(default="bf16"))
    model(torch.tensor([[0, 1]])).sum().backward()
    assert table.weight.grad.is_sparse == ("sparse" in settings)
    assert table.weight.grad.dtype == FULL
    if "max_norm" in settings:
        assert table.weight[:2].norm(dim=1).tolist() == pytest.approx([0.5, 0.5], abs=1e-6)
        assert (table.weight[2:].norm(dim=1) > 0.5).all()


class Normalised(nn.Module):
    """Spectral norm as older GAN code has it: it writes to parameters of another module under computed names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.u = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = getattr(self.inner, "u")  # noqa: B009
        u.data = u.data * 2
        return self.inner.forward(x) * u


def test_a_hidden_write_to_a_parameter_is_refused_and_lost_nowhere() -> None:
    model = apply_policy(nn.Sequential(Normalised()), Policy(default="bf16"))
    with pytest.raises(ApplyError, match="wrote to the parameter 'u' of Linear, which has a copy in bfloat16"):
        model(torch.ones(1, 2))
    assert remove_policy(model)[0].inner.u.tolist() == [1.0, 1.0]
    apply_policy(model, Policy(default="bf16", modules={"0": "fp32"}))(torch.ones(1, 2))
    assert model[0].inner.u.tolist() == [2.0, 2.0]


def test_a_write_in_place_to_a_plain_tensor_is_carried_over() -> None:
    def count(module: Any, x: torch.Tensor) -> torch.Tensor:
        module.count.add_(1)
        return x * module.count

    model = Calls(count)
    model.count = torch.tensor([3.0, 1000.0])
    apply_policy(model, Policy(default="bf16"))
    with pytest.warns(PrecisionWarning, match="writes to its tensor 'count'"):
        model(torch.ones(2))
    model(torch.ones(2))
    assert model.count.tolist() == [5.0, 1001.0]  # 1001 rounds to 1000 in bf16: the first write was lost, and told


def test_a_product_with_a_parameter_kept_in_fp32_and_a_module_that_came_later_are_explained() -> None:
    class Clipped(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data.clamp_(-1, 1)
            return super().forward(x)

    model = apply_policy(nn.Sequential(Clipped(4, 4)), Policy(default="bf16"))
    with pytest.raises(RuntimeError, match="same dtype") as raised:
        model(torch.ones(1, 4))
    assert "Clipped keeps weight in FP32" in raised.value.__notes__[0]
    model = apply_policy(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Policy(default="bf16"))
    model[1] = nn.Linear(4, 2)
    with pytest.raises(RuntimeError, match="same dtype") as raised:
        model(torch.ones(1, 4))
    assert (
        "added or replaced after the policy was applied and follow none of its rules: 1;" in raised.value.__notes__[0]
    )


# Forwards of other kinds


class Static(nn.Module):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


class OfClass(nn.Module):
    @classmethod
    def forward(cls, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


@pytest.mark.parametrize("precision", ["fp32", "autocast", "bf16"])
@pytest.mark.parametrize("make", [Static, OfClass])
def test_static_and_class_methods_are_forwards_too(make: type[nn.Module], precision: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), make())
    bare = model(torch.ones(1, 4))
    apply_policy(model, Policy(default="fp32", dtype="bf16", modules={"1": precision}))
    torch.testing.assert_close(model(torch.ones(1, 4)), bare, rtol=1e-2, atol=1e-2)
    checkpoint_modules(model, ["1"])
    model(torch.ones(1, 4)).sum().backward()
    assert apply_policy(make(), Policy(default=precision, dtype="bf16"))(torch.ones(2)).dtype == FULL


@pytest.mark.parametrize("precision", ["fp32", "autocast", "fp16", "bf16"])
@pytest.mark.parametrize("is_root", [True, False])
def test_a_forward_that_yields_computes_each_step_in_its_precision(is_root: bool, precision: Any) -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))
            self.seen: list[torch.dtype] = []

        def forward(self, x: torch.Tensor) -> Any:
            for _ in range(2):
                x = x @ self.weight
                self.seen.append(x.dtype)
                yield x
            return "end"

    steps = Steps()
    model = steps if is_root else Calls(lambda m, x: list(m.steps(x)), steps=steps)
    rules = {} if is_root else {"steps": precision}
    apply_policy(model, Policy(default=precision if is_root else "fp32", dtype="bf16", modules=rules))
    items = list(model(torch.ones(1, 4)))
    expected = {"fp32": FULL, "fp16": HALF}.get(precision, BFLOAT)
    assert steps.seen == [expected, expected]
    assert [item[0, 0].item() for item in items] == [4.0, 16.0]
    assert {item.dtype for item in items} == {FULL}
    assert steps.weight.dtype == FULL
    if is_root:
        steps_left = model(torch.ones(1, 4))
        next(steps_left)
        steps_left.close()


def test_names_that_look_like_globs_are_exact_names() -> None:
    layers = {"age[years]": nn.Linear(2, 2), "b*": nn.Linear(2, 2), "bc": nn.Linear(2, 2)}
    model = Calls(lambda m, x: [layer(x) for layer in m.layers.values()], layers=nn.ModuleDict(layers))
    apply_policy(model, Policy(default="fp32", modules={"layers.age[years]": "bf16", "layers.b*": "fp16"}))
    with watch_dtypes(model) as log:
        model(torch.ones(1, 2))
    assert log["layers.age[years]"].computed == {BFLOAT}
    assert log["layers.b*"].computed == {HALF}
    assert log["layers.bc"].computed == {FULL}


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)
        self.hidden = torch.zeros(1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = torch.tanh(self.cell(x) + self.hidden.detach())
        return self.hidden


@pytest.mark.parametrize("compiled", [False, True])
def test_a_state_that_the_forward_sets_anew_is_kept_and_has_its_dtype_outside(compiled: bool) -> None:
    torch._dynamo.reset()
    model, bare = Remembering(), Remembering()
    bare.load_state_dict(model.state_dict())
    apply_policy(model, Policy(default="bf16"))
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    for _ in range(3):
        run(torch.ones(1, 4)).sum().backward()
        bare(torch.ones(1, 4))
        torch.testing.assert_close(model.hidden, bare.hidden, rtol=3e-2, atol=3e-2)
    remove_policy(model)(torch.ones(1, 4))


def test_an_async_forward_is_refused_where_it_would_compute_in_fp32() -> None:
    class Later(nn.Module):
        async def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = nn.Sequential(Later())
    with pytest.raises(ApplyError, match=r"'0' has an `async` forward.*found bf16; allowed: fp32"):
        apply_policy(model, Policy(default="bf16"))
    apply_policy(model, Policy(default="bf16", modules={"0": "fp32"}))

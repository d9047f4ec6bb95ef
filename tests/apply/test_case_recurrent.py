"""Reported situations with their right values: recurrent layers and cells, and states that a forward keeps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from apply_models import Calls
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from autoprec import Policy, apply_policy, remove_policy
from autoprec.errors import ApplyError
from autoprec.probes.dtypes import watch_dtypes

HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32
HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32


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

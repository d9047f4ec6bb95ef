"""The guard of a long run: planted faults are named, moved to FP32 and written down; sound runs are left alone."""

from __future__ import annotations

import csv
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import POLICY, Net, digits, make, overflow_at, train
from torch import nn

from autoprec import Policy, apply_policy, build_grad_scaler, emulate, load_policy
from autoprec.apply import applied_policy
from autoprec.errors import TaskError, UsageError
from autoprec.guard import GuardRecord, TrainingGuard
from autoprec.policy import Evidence, GradScalerSettings, Recommendation, UnitEvidence
from autoprec.probes.dtypes import watch_dtypes
from autoprec.training import ScaleCollapsedError, TrainingStep


def kinds(guard: TrainingGuard) -> list[tuple[int, str, str]]:
    return [(event.step, event.kind, event.unit) for event in guard.events]


def test_an_overflow_planted_at_step_60_of_200_is_named_within_3_moved_and_the_run_ends_finite(tmp_path: Path) -> None:
    model = make()
    with emulate():
        guard, records = train(model, 200, at_step=overflow_at(60), patched_policy=tmp_path / "guarded.json")
        assert kinds(guard) == [(60, "buffers", ""), (61, "named", "body"), (62, "moved", "body")]
        assert [r.step for r in records if r.skipped] == [60, 61, 62]
        assert [r.step for r in records if not math.isfinite(r.loss or 0)] == [60, 61, 62]
        assert (records[59].nan_rate, records[61].skip_rate) == (1 / 60, 3 / 62)
        assert records[-1].loss is not None
        assert records[-1].loss < records[58].loss
        assert all(bool(torch.isfinite(t).all()) for t in model.state_dict().values() if t.is_floating_point())
        patched = load_policy(tmp_path / "guarded.json")
        assert patched == applied_policy(model)
        assert dict(patched.modules) == {"norm": "fp32", "head": "fp32", "body": "fp32"}
        with watch_dtypes(model) as log:
            model(next(digits())[0])
        assert (log["stem"].computed, log["body"].computed) == ({torch.float16}, {torch.float32})


def test_after_the_move_the_loss_scale_is_the_one_from_before_the_overflow(tmp_path: Path) -> None:
    with emulate():
        _, records = train(make(), 8, at_step=overflow_at(4), patched_policy=tmp_path / "p.json")
    assert [r.loss_scale for r in records] == [1024, 1024, 1024, 1024, 512, 256, 1024, 1024]


def test_a_sound_run_is_only_looked_at() -> None:
    with emulate():
        model = make()
        guard, records = train(model, 12)
        plain = make()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        scaler = build_grad_scaler(POLICY, device="cpu")
        for record, (images, labels) in zip(records, digits(), strict=False):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(plain(images), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = float(nn.utils.get_total_norm([p.grad for p in plain.parameters()]))
            scaler.step(optimizer)
            scaler.update()
            assert (record.loss, record.grad_norm) == (float(loss.detach()), norm)
    assert guard.events == []
    for mine, other in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, other)


class GreatGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1e6


class GreatBackward(nn.Linear):
    is_broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(GreatGradient.apply(x) if self.is_broken else x)


def test_a_unit_whose_gradients_overflow_moves_when_the_scale_is_at_its_floor(tmp_path: Path) -> None:
    model = Net()
    model.body = GreatBackward(32, 32)

    def plant(step: int, model: nn.Module) -> None:
        model.body.is_broken = step >= 3

    policy = POLICY.replace(modules={**POLICY.modules, "stem": "fp32"})
    with emulate():
        guard, records = train(
            make(policy, model),
            12,
            policy=policy,
            at_step=plant,
            patched_policy=tmp_path / "p.json",
            min_scale=256.0,
        )
    assert kinds(guard) == [(5, "named", "body"), (5, "floor", ""), (6, "moved", "body")]
    assert [r.loss_scale for r in records] == [1024, 1024, 1024, 512, 256, 256, 256, 256, 256, 256, 256, 256]
    assert [r.skipped for r in records] == [2 <= i <= 5 for i in range(12)]


def test_a_scale_that_starts_too_high_or_grew_too_far_moves_nobody(tmp_path: Path) -> None:
    high = POLICY.replace(grad_scaler=GradScalerSettings(init_scale=2.0**20, growth_interval=4))
    with emulate():
        guard, records = train(make(high), 40, policy=high, patched_policy=tmp_path / "p.json")
    assert sum(r.skipped for r in records) >= 4
    assert [event.kind for event in guard.events if event.kind != "named"] == []
    assert all(r.non_finite_buffers in (None, 0) for r in records)


class Residual(nn.Module):
    """The sum of two parts that are fine by themselves leaves FP16's range in the block's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        total = self.first(x) + self.second(x)
        return self.norm(total if mask is None else total + mask.clamp(min=-1))


def grown(model: Residual, weight: float) -> Residual:
    with torch.no_grad():
        for part in (model.first, model.second):
            part.weight.fill_(weight)
            part.bias.zero_()
    return model


def step_on(model: nn.Module, x: torch.Tensor, count: int, policy: Policy, **settings: Any) -> TrainingGuard:
    scaler = build_grad_scaler(policy, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with TrainingGuard(model, grad_scaler=scaler, **settings) as guard:
        for _ in range(count):
            optimizer.zero_grad()
            loss = model(x).square().mean() if not isinstance(x, tuple) else model(*x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            guard.after_step(loss)
    return guard


HALF_PARTS = Policy(default="fp32", modules={"block.first": "fp16", "block.second": "fp16"})


@pytest.mark.parametrize(
    ("policy", "moved"),
    [(HALF_PARTS, "block.second"), (Policy(default="fp16"), "block")],
    ids=["fp32 block of half parts", "half block"],
)
def test_a_sum_that_overflows_between_units_is_mended(policy: Policy, moved: str, tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("block", grown(Residual(), 5000.0))
    apply_policy(model, policy)
    with emulate():
        guard = step_on(model, torch.ones(4, 8), 5, policy, patched_policy=tmp_path / "p.json")
    assert [(e.kind, e.unit) for e in guard.events] == [("named", moved), ("moved", moved)]


def test_a_cast_into_the_first_of_several_half_layers_is_that_layers_fault(tmp_path: Path) -> None:
    policy = Policy(default="fp32", modules={"2": "fp16", "3": "fp16"})
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8))
    nn.init.constant_(model[0].weight, 1e5)
    apply_policy(model, policy)
    with emulate():
        guard = step_on(model, torch.ones(4, 8), 4, policy, patched_policy=tmp_path / "p.json")
    moved = [event.unit for event in guard.events if event.kind == "moved"]
    assert moved[0] == "2"


def test_the_minus_infinity_of_a_mask_is_no_fault(tmp_path: Path) -> None:
    policy = Policy(default="fp16")
    model = apply_policy(grown(Residual(), 0.1), policy)
    mask = torch.full((4, 8), -math.inf)
    with emulate():
        guard = step_on(model, (torch.ones(4, 8), mask), 3, policy)
        guard._culprits.start()
        model(torch.ones(4, 8), mask)
        assert guard._culprits._watch.found is None
        guard.close()


def test_a_batch_that_is_not_finite_is_named_and_nothing_moves(tmp_path: Path) -> None:
    policy = Policy(default="fp16")
    model = apply_policy(grown(Residual(), 0.1), policy)
    with emulate():
        guard = step_on(model, torch.full((4, 8), math.nan), 5, policy, patched_policy=tmp_path / "p.json")
    assert [event.message for event in guard.events] == [
        "values stop being finite in the model itself (input: it was handed to the model)"
    ]
    assert list(tmp_path.iterdir()) == []


def test_units_that_share_a_weight_move_together(tmp_path: Path) -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.again = nn.Linear(32, 32)
            self.again.weight = self.body.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.body(torch.relu(self.stem(x))))) + self.again(torch.zeros(1, 32))[:, :10]

    model = make(model=Tied())
    with emulate():
        train(model, 6, at_step=overflow_at(3), patched_policy=tmp_path / "p.json")
    assert {name: load_policy(tmp_path / "p.json").modules[name] for name in ("body", "again")} == {
        "body": "fp32",
        "again": "fp32",
    }


def test_a_compiled_model_is_watched_and_compiled_again_afterwards(tmp_path: Path) -> None:
    runs = itertools.count()

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        next(runs)
        return graph.forward

    model = make(POLICY.replace(default="bf16", dtype="bf16"))
    compiled = torch.compile(model, backend=counting)
    with TrainingGuard(compiled) as guard:
        compiled(next(digits())[0])
        before = next(runs)
        with torch.no_grad():
            model.stem.weight.fill_(math.nan)
        for _ in range(2):
            compiled(next(digits())[0])
            guard.after_step(math.nan)
    assert before >= 1
    assert [(event.kind, event.unit) for event in guard.events] == [("buffers", ""), ("named", "stem")]
    count = next(runs)
    torch._dynamo.reset()
    compiled(next(digits())[0])
    assert next(runs) > count + 1


def test_without_a_scaler_a_loss_that_stays_nan_ends_the_training() -> None:
    guard = TrainingGuard(nn.Linear(1, 1), max_consecutive_skips=3)
    guard.after_step(1.0)
    guard.after_step(math.nan)
    guard.after_step(math.inf)
    with pytest.raises(TaskError, match=r"not finite in 3 steps in a row, up to step 4"):
        guard.after_step(math.nan)


def test_a_scale_never_falls_below_its_floor_and_a_collapse_ends_the_training() -> None:
    records: list[GuardRecord] = []

    class Kept:
        def write(self, record: GuardRecord) -> None:
            records.append(record)

        def close(self) -> None:
            pass

    with emulate(), pytest.raises(ScaleCollapsedError, match="15 steps in a row were skipped"):
        train(make(), 40, at_step=overflow_at(1), log=Kept(), max_consecutive_skips=15, min_scale=4.0)
    assert [r.loss_scale for r in records] == [1024, 512, 256, 128, 64, 32, 16, 8, *[4.0] * 7]


def test_the_csv_has_a_line_for_each_step_and_a_resumed_run_continues_it(tmp_path: Path) -> None:
    place = tmp_path / "guard.csv"
    with emulate():
        train(make(), 3, log=place, at_step=overflow_at(3))
        train(make(), 2, log=place)
    rows = list(csv.DictReader(place.read_text().splitlines()))
    assert [row["step"] for row in rows] == ["1", "2", "3", "1", "2"]
    assert [row["loss"] for row in rows][2] == "nan"
    assert [row["skipped"] for row in rows] == ["0", "0", "1", "0", "0"]
    assert rows[2]["grad_norm"] == ""
    assert float(rows[0]["grad_norm"]) > 0
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match=r"other.csv is there and is no log of a guard"):
        TrainingGuard(Net(), log=other)
    assert other.read_text() == "a,b\n1,2\n"


def test_a_summary_writer_gets_scalars_by_name_and_events_as_text() -> None:
    scalars: dict[str, list[tuple[int, float]]] = {}
    texts: list[tuple[int, str]] = []

    class Writer:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            scalars.setdefault(tag, []).append((global_step, scalar_value))

        def add_text(self, tag: str, text_string: str, global_step: int) -> None:
            texts.append((global_step, text_string))

    with emulate():
        train(make(), 4, log=Writer(), at_step=overflow_at(3))
    assert scalars["guard/loss_scale"] == [(1, 1024.0), (2, 1024.0), (3, 1024.0), (4, 512.0)]
    assert scalars["guard/skipped"] == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0)]
    assert [step for step, _ in scalars["guard/grad_norm"]] == [1, 2]
    assert texts[-1] == (4, "values stop being finite in body (forward: its output)")


def test_a_file_that_is_there_is_never_overwritten_and_what_was_proved_is_not_claimed(tmp_path: Path) -> None:
    place = tmp_path / "policy.json"
    found = POLICY.replace(
        recommendation=Recommendation(choice="policy", sentence="Use it."),
        evidence=Evidence(units={"stem": UnitEvidence(precision="fp16", reason="gains")}),
    )
    found.save(place)
    with emulate():
        train(make(found), 6, policy=found, at_step=overflow_at(2), patched_policy=place)
    assert load_policy(place) == found
    patched = load_policy(tmp_path / "policy-2.json")
    assert patched.recommendation is None
    assert patched.evidence is not None
    assert patched.evidence.units["stem"].reason == "gains"
    assert patched.evidence.units["body"].precision == "fp32"


def test_a_resumed_run_has_the_units_that_were_moved(tmp_path: Path) -> None:
    with emulate():
        guard, _ = train(make(), 6, at_step=overflow_at(3), patched_policy=tmp_path / "p.json")
        state = guard.state_dict()
        model = make()
        resumed = TrainingGuard(model, patched_policy=tmp_path / "p.json")
        resumed.load_state_dict(state)
        assert applied_policy(model) == load_policy(tmp_path / "p.json")
        record = resumed.after_step(0.5)
    assert (record.step, record.nan_rate) == (7, 3 / 7)


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}], ids=["default", "foreach", "fused"])
def test_the_norm_is_that_of_the_unscaled_gradients(settings: dict[str, bool]) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    guard = TrainingGuard(model, optimizer=optimizer, grad_scaler=scaler)
    step = TrainingStep(optimizer, grad_scaler=scaler)
    step(model(torch.tensor([[3.0, 4.0]])).sum())
    assert guard.after_step().grad_norm == pytest.approx(5.0)


def test_every_tenth_step_alone_waits_for_the_device() -> None:
    with emulate():
        _, records = train(make(), 20, every=10)
    assert [r.step for r in records if r.loss is not None] == [10, 20]
    assert [r.step for r in records if r.grad_norm is not None] == [10, 20]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patience": 0}, "patience is 0; at least 1"),
        ({"window": 0}, "window is 0; at least 1"),
        ({"every": 0}, "every is 0; at least 1"),
        ({"min_scale": 0.0}, "min_scale is 0.0; a number above 0"),
        ({"max_consecutive_skips": 2}, "max_consecutive_skips is 2; above patience, 2"),
        ({"log": 3}, "log is int; allowed: a path"),
        ({"log": "no_such_folder/x.csv"}, "x.csv: the log cannot be written"),
        ({"patched_policy": "p.json"}, "the model has no policy: apply_policy first"),
        (
            {"grad_scaler": torch.amp.GradScaler("cpu", init_scale=0.5)},
            "the loss scale is 0.5, below its floor min_scale=1",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_wrong_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainingGuard(nn.Linear(1, 1), **settings)


def test_a_guard_that_is_dropped_while_it_looks_lets_others_compile() -> None:
    import gc

    import torch._dynamo

    model = nn.Linear(2, 2)
    guard = TrainingGuard(model)
    guard._culprits.start()
    assert guard._culprits.is_watching
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    del guard
    gc.collect()
    assert torch._dynamo.eval_frame._stance.stance == "default"

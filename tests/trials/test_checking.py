"""A wrong task is one clear message before the first trial: the field, what it was or returned, what is needed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_tasks import batches, cross_entropy, gan_task, maker_loss, network, share_correct, small_task
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from autoprec.errors import StudyError, TaskError
from autoprec.policy import Policy
from autoprec.profiling.run import take_profile
from autoprec.tasks import TargetShape, Task
from autoprec.trials import TrialSettings, run_trial
from autoprec.trials.checking import RAISES_IN_AUTOCAST, check_task

SETTINGS = TrialSettings(warmup_steps=1, measured_steps=3, batchnorm_batches=1)


def check(task: Task, *, num_steps: int = 6) -> list[str]:
    return check_task(task, SETTINGS, num_steps=num_steps)


def frozen() -> nn.Module:
    return network().requires_grad_(False)


def half_built() -> nn.Module:
    model = network()
    model[0].half()  # type: ignore[index]
    return model


def fails(*_: Any) -> Any:
    raise KeyError("pixels")


def vector_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def other_models_parameters(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(network().parameters(), lr=0.1)


def loss_of_a_stranger(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(STRANGER, batch)


def target(make_batch: Any, *, batch_size: int = 8, model: Any = None) -> dict[str, Any]:
    return {"target": TargetShape(make_batch=make_batch, batch_size=batch_size, model=model)}


STRANGER = network()
SHARED = network()


def endless_generator() -> Iterator[Any]:
    while True:
        yield from batches(0)


ONE = endless_generator()
TOO_FEW = DataLoader(TensorDataset(torch.randn(3, 4), torch.zeros(3)), batch_size=8, drop_last=True)

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no name": ({"name": ""}, "the task's name is ''"),
    "a built model": ({"model": network()}, "model is a Sequential; a function that builds it is needed"),
    "model is none": ({"model": None}, "model is None; a function is needed, called as model()"),
    "model of wrong arity": ({"model": nn.Linear}, r"model\(\) is how it is called, .* argument: 'in_features'"),
    "no module": ({"model": lambda: {"net": network()}}, r"model\(\) returned dict; an nn.Module is needed"),
    "model raises": ({"model": fails}, r"model\(\) raised KeyError: 'pixels'"),
    "model needs an extra": (
        {"model": lambda: __import__("aeonn")},
        r"model\(\) needs the module 'aeonn', .* pip install aeonn",
    ),
    "one model for all trials": ({"model": lambda: SHARED}, r"model\(\) returned the same object twice"),
    "all frozen": ({"model": frozen}, r"no parameter of Sequential is trainable \(all are frozen\)"),
    "half masters": (
        {"model": half_built},
        r"found 0.weight \(float16\), 0.bias \(float16\); .*lift_half_parameters=True",
    ),
    "loss raises": ({"loss": fails}, r"loss\(model, batch\) raised KeyError: 'pixels'"),
    "loss of wrong arity": ({"loss": lambda model: None}, r"loss\(model, batch\) is how it is called, .*too many pos"),
    "loss is no scalar": (
        {"loss": vector_loss},
        r"loss\(model, batch\) returned a tensor of shape \(8,\) and dtype float32",
    ),
    "loss is no tensor": (
        {"loss": lambda m, b: cross_entropy(m, b).item()},
        r"loss\(model, batch\) returned 0\.\d+; one",
    ),
    "loss is an integer": ({"loss": lambda m, b: torch.tensor(1)}, "shape .. and dtype int64; one floating number"),
    "loss is detached": ({"loss": lambda m, b: cross_entropy(m, b).detach()}, "a tensor without gradient: detached"),
    "loss is NaN": ({"loss": lambda m, b: cross_entropy(m, b) * float("nan")}, "is nan on the first batch, in FP32"),
    "loss of another model": (
        {"loss": loss_of_a_stranger},
        "no parameter of the optimizer gets a gradient from the loss",
    ),
    "no batches": ({"train_batches": []}, r"train_batches: there are 0 batches \(an empty list\)"),
    "fewer samples than a batch": (
        {"train_batches": lambda: TOO_FEW},
        r"train_batches: there are 0 batches \(3 samples, batch size 8, drop_last\)",
    ),
    "no held-out batches": ({"eval_batches": lambda: iter(())}, "eval_batches: there are 0 batches"),
    "batches are no iterable": ({"train_batches": 5}, "task '[^']+': train_batches is int; batches in a list"),
    "batches return no iterable": ({"eval_batches": lambda: 5}, r"eval_batches\(\) is int; batches in a list"),
    "batches raise": ({"train_batches": fails}, r"train_batches\(\) raised KeyError"),
    "a loader raises": ({"train_batches": lambda: map(fails, [1])}, "train_batches raised KeyError: 'pixels'"),
    "one generator for all trials": ({"train_batches": lambda: ONE}, r"train_batches\(\) returned one iterator twice"),
    "a generator that ends": (
        {"train_batches": iter(batches(0, num_batches=5))},
        "one-shot iterator that gave only 5 of 6 batches",
    ),
    "batches without a size": (
        {"train_batches": ["text"]},
        "a batch of type str holds no tensor with a batch dimension",
    ),
    "num_samples of nothing": ({"num_samples": lambda b: None}, r"num_samples\(batch\) returned None; a whole number"),
    "num_tokens below one": ({"num_tokens": lambda b: 0}, r"num_tokens\(batch\) returned 0; a whole number from 1"),
    "no optimizer": (
        {"optimizer": lambda p: None},
        r"optimizer\(\) returned NoneType; a torch.optim.Optimizer is needed",
    ),
    "a built optimizer": (
        {"optimizer": torch.optim.SGD(network().parameters())},
        "optimizer is an SGD that was built already",
    ),
    "optimizer of no parameters": (
        {"optimizer": lambda p: torch.optim.SGD([], lr=0.1)},
        r"optimizer\(parameters\) raised ValueError: optimizer got an empty parameter list",
    ),
    "optimizer of other parameters": ({"optimizer": other_models_parameters}, "holds none of the model's trainable"),
    "optimizer setting": (
        {"optimizer_settings": {"learning_rate": 1}},
        r"optimizer\(parameters\) raised TypeError: .*learn",
    ),
    "a closure optimizer": (
        {"optimizer": torch.optim.LBFGS, "optimizer_settings": {}},
        "LBFGS evaluates the loss in a closure",
    ),
    "scheduler of wrong arity": (
        {"scheduler": lambda o: None},
        r"scheduler\(optimizer, num_steps\) is how it is called",
    ),
    "no scheduler": ({"scheduler": lambda o, n: None}, r"scheduler\(optimizer, num_steps\) returned None; an object"),
    "scheduler that wants a loss": (
        {"scheduler": lambda o, n: torch.optim.lr_scheduler.ReduceLROnPlateau(o)},
        r"scheduler\(optimizer, num_steps\).step\(\) is how it is called, .*'metrics'",
    ),
    "metric raises": ({"metric": fails}, r"metric\(model, batch\) raised KeyError"),
    "metric is a vector": (
        {"metric": lambda m, b: (m(b[0]).argmax(1) == b[1]).float()},
        r"the metric returned Tensor of shape \(8,\); one number is needed",
    ),
    "metric is a text": ({"metric": lambda m, b: "0.5"}, "the metric returned str; one number is needed"),
    "metric is undefined": (
        {"metric": lambda m, b: float("nan"), "metric_name": "auroc"},
        "auroc is nan on the first held-out batch, in FP32: it is undefined on this held-out slice",
    ),
    "evaluate returns one number": (
        {"evaluate": share_correct},
        r"evaluate\(model, batch\) returned a tensor .*\(loss, m",
    ),
    "clipping at zero": ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0; a number above 0"),
    "clipping of text": ({"max_grad_norm": "1"}, "max_grad_norm is '1'; a number above 0"),
    "an optimizer by name": ({"optimizer": "adam"}, "optimizer is 'adam'; a class, or a function from parameters"),
    "model ends the program": ({"model": lambda: sys.exit(3)}, r"model\(\) raised SystemExit: 3"),
    "batches without samples": (
        {"eval_batches": [(torch.zeros(0, 4), torch.zeros(0))]},
        r"eval_batches gave a batch without samples: a tensor of shape \(0, 4\)",
    ),
    "settings that are no JSON": (
        {"settings": {"data": torch.zeros(1)}},
        r"settings\['data'\] is a tensor .* JSON value",
    ),
    "target that is none": ({"target": 128}, "target is 128; a TargetShape is needed"),
    "target raises": (target(fails), r"target.make_batch\(\) raised KeyError: 'pixels'"),
    "target of another size": (
        target(lambda: batches(0)[0], batch_size=99),
        r"target.batch_size is 99, and target.make_batch\(\) made 8 samples",
    ),
    "target of another shape": (
        target(lambda: (torch.zeros(8, 9), torch.zeros(8, dtype=torch.long))),
        r"at the target shape, loss\(model, batch\) raised RuntimeError: .* \(8x9 and 4x",
    ),
    "target's model is none": (target(lambda: batches(0)[0], model=dict), r"model\(\) returned dict; an nn.Module"),
}


@pytest.mark.parametrize(("changes", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_task_names_the_field_and_what_was_returned(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words) as raised:
        check(small_task(**changes))
    assert str(raised.value).count("\n") == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metric_direction": "up"}, "metric_direction is 'up'; allowed: maximize, minimize"),
        ({"accumulation_steps": 0}, "accumulation_steps is 0; a whole number from 1"),
        ({"accumulation_steps": "2"}, "accumulation_steps is '2'; a whole number from 1"),
    ],
    ids=["direction", "accumulation", "accumulation of text"],
)
def test_a_wrong_setting_is_refused_where_the_task_is_made(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        small_task(**changes)


def test_the_users_own_error_is_the_cause() -> None:
    with pytest.raises(TaskError) as raised:
        check(small_task(loss=fails))
    assert isinstance(raised.value.__cause__, KeyError)


def test_a_batch_that_does_not_fit_in_memory_is_no_wrong_task() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.raises(StudyError, match=r"FP32 does not fit in memory: loss\(model, batch\) raised OutOfMemoryError"):
        check(small_task(loss=loss))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"losses": {"critik": maker_loss}}, "losses names 'critik'"),
        ({"losses": {"maker": lambda nets, batch: 0.5}}, r"losses\['maker'\]\(model, batch\) returned 0.5"),
        ({"losses": {"critic": maker_loss, "maker": fails}}, r"losses\['maker'\]\(model, batch\) raised KeyError"),
        ({"losses": [maker_loss]}, "losses is a list; a mapping is needed"),
    ],
    ids=["no such part", "no tensor", "raises", "a list"],
)
def test_a_wrong_loss_of_several_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        check(gan_task(**changes))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from [(x[0], y[0]) for x, y in batches(0)]


RIGHT: dict[str, Callable[[], Task]] = {
    "plain": small_task,
    "gan": gan_task,
    "accumulation": lambda: small_task(accumulation_steps=4),
    "no metric": lambda: small_task(metric=None),
    "a loader without a length": lambda: small_task(train_batches=DataLoader(Endless(), batch_size=2)),
    "a one-shot iterator": lambda: small_task(train_batches=iter(batches(0, num_batches=40))),
    "a scheduler": lambda: small_task(scheduler=lambda o, n: torch.optim.lr_scheduler.LinearLR(o, total_iters=n)),
    "lazy": lambda: small_task(model=lambda: nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2))),
    "lifted": lambda: small_task(model=half_built, lift_half_parameters=True),
    "target": lambda: small_task(target=TargetShape(make_batch=lambda: batches(0)[0], batch_size=8)),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT)
def test_a_right_task_passes_and_then_trains(make: Callable[[], Task]) -> None:
    task = make()
    state = torch.get_rng_state()
    assert check(task) == []
    assert torch.equal(torch.get_rng_state(), state)
    outcome = run_trial(task, Policy(default="fp32"), SETTINGS)
    assert outcome.is_ok, outcome.message


def test_the_check_takes_nothing_from_a_one_shot_iterator() -> None:
    task = small_task(train_batches=iter(batches(0, num_batches=6)))
    check(task)
    seen = run_trial(task, Policy(default="fp32"), SETTINGS)
    assert seen.train_losses == run_trial(small_task(), Policy(default="fp32"), SETTINGS).train_losses


def test_what_is_not_trained_and_what_is_random_is_noted() -> None:
    generator = torch.Generator().manual_seed(0)

    def shuffled() -> list[Any]:
        return [(torch.randn(8, 4, generator=generator), torch.zeros(8, dtype=torch.long)) for _ in range(6)]

    def weights() -> nn.Module:
        model = network()
        nn.init.normal_(model[0].weight, generator=generator)  # type: ignore[index,arg-type]
        return model

    def head_alone(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(parameters)[-2:], lr=0.1)

    notes = check(small_task(train_batches=shuffled, model=weights, optimizer=head_alone))
    assert [note.partition(":")[0] for note in notes] == [
        "the training batches differ between two openings under one seed, so that no two trials see the same",
        "model() gives other weights each time, under one seed",
        "in no optimizer, and so not trained",
    ]
    assert "0.weight, 0.bias, 1.weight, 1.bias" in notes[2]


def test_a_lifted_model_has_fp32_masters_in_every_trial() -> None:
    dtypes: list[torch.dtype] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        dtypes.extend(p.dtype for p in model.parameters())
        return cross_entropy(model, batch)

    task = small_task(model=half_built, lift_half_parameters=True, loss=loss)
    assert run_trial(task, Policy(default="fp16"), SETTINGS).is_ok
    assert set(dtypes) == {torch.float32}


def adapted() -> nn.Module:
    """Adapters on a frozen half base: autocast alone brings the two together."""
    base = nn.Linear(4, 4).half().requires_grad_(False)
    return nn.Sequential(base, nn.Linear(4, 2))


def test_frozen_half_weights_that_fp32_cannot_compute_with_are_named_with_what_to_do() -> None:
    with pytest.raises(TaskError) as raised:
        check(small_task(model=adapted))
    text = str(raised.value)
    assert "frozen weights are half (0.weight (float16), 0.bias (float16))" in text
    assert "build the model with them in FP32" in text


def test_a_loss_that_evaluation_mode_cannot_compute_is_found_before_the_first_trial() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)
            self.num_calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.is_grad_enabled() and self.training:
                raise ValueError("no training without gradients")
            return self.head(self.norm(x))

    with pytest.raises(TaskError, match="statistics estimated anew, raised ValueError: no training without"):
        check(small_task(model=Normed))


@pytest.mark.parametrize("kind", ["coo", "csr", "jagged"])
def test_batches_of_sparse_and_nested_tensors_are_batches_like_others(kind: str) -> None:
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        dense = torch.eye(8, 4)
        if kind == "jagged":
            parts = [torch.ones(3, 4), torch.ones(5, 4)]
            return torch.nested.nested_tensor(parts, layout=torch.jagged), torch.zeros(8, dtype=torch.long)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the layout is in beta
            return dense.to_sparse() if kind == "coo" else dense.to_sparse_csr(), torch.zeros(8, dtype=torch.long)

    def loss(model: nn.Module, made: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, labels = made
        output = model(inputs).values() if kind == "jagged" else inputs @ model(torch.eye(4))
        return nn.functional.cross_entropy(output, labels)

    task = small_task(
        model=lambda: nn.Linear(4, 2), train_batches=[batch(), batch()], eval_batches=[batch()], loss=loss, metric=None
    )
    assert check(task) == []
    for policy in (Policy(default="fp32"), Policy(default="autocast", dtype="fp16")):
        outcome = run_trial(task, policy, SETTINGS)
        assert outcome.is_ok, outcome.message


def test_sparse_gradients_are_trained_clipped_and_profiled() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(ids))

    made = [(torch.arange(8) + place, torch.arange(8) % 2) for place in range(4)]
    task = small_task(model=Words, train_batches=made, eval_batches=made, optimizer=torch.optim.SGD, max_grad_norm=1.0)
    assert check(task) == []
    assert run_trial(task, Policy(default="autocast", dtype="fp16"), SETTINGS).is_ok
    profile = take_profile(task, ["table", "head"], SETTINGS, study_name="sparse")
    assert profile.units["table"].parameter_gradients.num_values > 0
    assert min(profile.gradient_maxima) > 0


def test_a_training_batch_with_nan_is_named_and_no_module() -> None:
    made = [(torch.randn(8, 4), torch.arange(8) % 2) for _ in range(4)]
    made[2][0][3, 1] = torch.nan
    task = small_task(model=lambda: nn.Linear(4, 2), train_batches=made, eval_batches=made[:1], metric=None)
    outcome = run_trial(task, Policy(default="fp32"), SETTINGS)
    assert outcome.kind == "user_error"
    assert "training batch 3 holds 1 NaN in its tensor 1 (8x4 float32)" in outcome.message
    with pytest.raises(TaskError, match="training batch 3 holds 1 NaN in its tensor 1"):
        take_profile(task, [""], SETTINGS, study_name="nan")
    with pytest.raises(TaskError, match="is nan on the first batch, in FP32: the batch holds 1 NaN"):
        check(small_task(model=lambda: nn.Linear(4, 2), train_batches=made[2:], eval_batches=made[:1], metric=None))


def test_a_loss_that_plain_autocast_refuses_is_noted_and_trains_under_a_policy() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.binary_cross_entropy(model(batch[0]).sigmoid()[:, 0], batch[1].float())

    notes = check(small_task(loss=loss))
    assert len(notes) == 1
    assert notes[0].startswith(f"{RAISES_IN_AUTOCAST}: RuntimeError: binary_cross_entropy is banned")
    outcome = run_trial(small_task(loss=loss), Policy(default="autocast", dtype="fp16"), SETTINGS)
    assert outcome.is_ok, outcome.message


class Cubed(nn.Module):
    """Running statistics of values that overflow in FP16, and not in FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        nn.init.constant_(self.up.weight, 300.0)
        self.register_buffer("running_mean", torch.zeros(4))  # of no class that a trial estimates anew
        self.register_buffer("running_var", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        normed = nn.functional.batch_norm(y * y * y, self.running_mean, self.running_var, training=self.training)
        return self.head(normed)


def test_the_look_at_plain_autocast_leaves_running_statistics_as_they_were() -> None:
    task = small_task(model=Cubed)
    check_task(
        task, TrialSettings(), num_steps=4
    )  # evaluates after the look: statistics of infinity would be no number
    model = Cubed()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        model(batches(0)[0][0])
    assert not torch.isfinite(model.running_var).all()  # what the look does, and has to undo

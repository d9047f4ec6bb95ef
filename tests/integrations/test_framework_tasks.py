"""A LightningModule with its data and a Trainer with its data set are tasks: trained, evaluated and searched."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="the extra `lightning` is not installed")
pytest.importorskip("transformers", reason="the extra `hf` is not installed")
pytest.importorskip("accelerate", reason="the extra `accelerate` is not installed")

import lightning
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import BertForSequenceClassification

import autoprec
from autoprec import Policy
from autoprec.apply import applied_policy
from autoprec.errors import TaskError, UsageError
from autoprec.search.measuring import open_measure
from autoprec.search.pipeline import run_search
from autoprec.search.plan import SearchSettings, prepare_search, task_identity
from autoprec.search.proof import Proof
from autoprec.tasks import Task
from autoprec.tasks.batches import BatchStream
from autoprec.tasks.source import resolve_task, source_named
from autoprec.trials.building import build_model, build_schedulers, build_task_optimizers
from autoprec.trials.checking import check_task
from autoprec.trials.evaluation import evaluate
from autoprec.trials.outcome import TrialSettings
from autoprec.trials.runner import run_trial

FILE = Path(__file__).parent / "framework_tasks.py"
NAMES = {"lightning": f"lightning:{FILE}:digits_module", "trainer": f"trainer:{FILE}:topics_trainer"}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tasks() -> dict[str, Task]:
    return {kind: resolve_task(name) for kind, name in NAMES.items()}


def test_a_lightning_task_has_the_modules_own_parts(tasks: dict[str, Task]) -> None:
    task = tasks["lightning"]
    assert (task.name, task.metric_name, task.max_grad_norm) == ("Digits", "val_accuracy", 1.0)
    torch.manual_seed(3)
    first, second = task.model(), task.model()
    assert isinstance(first, lightning.LightningModule)
    assert not torch.equal(first.model.stem.weight, second.model.stem.weight)
    (optimizer,) = build_task_optimizers(task, Policy(optimizer={"eps": 1e-5}), first)
    assert type(optimizer) is torch.optim.AdamW
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["eps"]) == (3e-3, 1e-5)
    assert list(optimizer.param_groups[0]["params"]) == list(first.parameters())
    batch = next(iter(task.train_batches()))
    assert task.loss(first, batch).item() == first.training_step(batch, 0).item()


def test_a_schedule_in_epochs_is_stepped_as_often_as_an_epoch_has_steps(tasks: dict[str, Task]) -> None:
    task = tasks["lightning"]
    model = build_model(task, CPU)
    optimizers = build_task_optimizers(task, Policy(), model)
    (schedule,) = build_schedulers(task, optimizers, num_steps=40, anneal=True)
    seen = []
    for _ in range(40):
        optimizers[0].step()
        schedule.step()
        seen.append(optimizers[0].param_groups[0]["lr"])
    assert seen[:19] == [3e-3] * 19  # 640 digits in batches of 32
    assert seen[19:39] == [1.5e-3] * 20
    assert seen[39] == 0.75e-3


def test_the_metric_is_what_the_validation_step_logs(tasks: dict[str, Task]) -> None:
    task = tasks["lightning"]
    model = build_model(task, CPU)
    found = evaluate(model, task, device=CPU)
    correct = 0.0
    with torch.no_grad():
        for images, labels in task.eval_batches():
            correct += float((model.model(images).argmax(1) == labels).sum())
    assert found.num_samples == 240
    assert found.metric == pytest.approx(correct / 240)
    assert found.loss == pytest.approx(math.log(10), abs=0.5)


def test_a_trainer_task_has_the_trainers_own_parts(tasks: dict[str, Task]) -> None:
    task = tasks["trainer"]
    assert (task.name, task.metric_name) == ("BertForSequenceClassification", "accuracy")
    assert (task.max_grad_norm, task.accumulation_steps) == (0.7, 2)
    torch.manual_seed(0)
    first, second = task.model(), task.model()
    assert isinstance(first, BertForSequenceClassification)
    optimizers = build_task_optimizers(task, Policy(optimizer={"amsgrad": True}), first)
    assert [group["amsgrad"] for group in optimizers[0].param_groups] == [True, True]
    held = {id(parameter) for group in optimizers[0].param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in first.parameters()}
    assert not held & {id(parameter) for parameter in second.parameters()}
    (schedule,) = build_schedulers(task, optimizers, num_steps=11, anneal=False)
    rates = []
    for _ in range(11):
        rates.append(schedule.get_last_lr()[0])
        optimizers[0].step()
        schedule.step()
    assert rates == pytest.approx([2e-3 * share for share in (0, *(1 - 0.1 * step for step in range(10)))])
    batch = next(iter(task.train_batches))
    assert task.loss(first, batch).item() == first(**batch).loss.item()
    assert task.num_tokens is not None
    assert task.num_tokens(batch) == int(batch["attention_mask"].sum())


def test_a_trainers_metric_is_that_of_its_own_evaluation(tasks: dict[str, Task]) -> None:
    from framework_tasks import topics_trainer

    task = tasks["trainer"]
    model = build_model(task, CPU)
    trainer = topics_trainer(disable_tqdm=True, dataloader_pin_memory=False)
    trainer.model = model
    expected = trainer.evaluate()
    found = evaluate(model, task, device=CPU)
    assert found.metric == pytest.approx(expected["eval_accuracy"])
    assert found.loss == pytest.approx(expected["eval_loss"], rel=1e-4)


def test_a_training_step_goes_through_the_wrapper_that_averages_gradients(tasks: dict[str, Task]) -> None:
    task = tasks["lightning"]
    model = task.model()
    autoprec.apply_policy(model, Policy(default="bf16", modules={"model.norm": "fp32"}))
    batch = next(iter(task.train_batches()))
    bare = task.loss(model, batch)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model)
        called: list[str] = []
        wrapped.register_forward_hook(lambda *_: called.append("forward"))
        loss = task.loss(wrapped, batch)
        loss.backward()
    finally:
        dist.destroy_process_group()
    assert called == ["forward"]
    assert loss.item() == bare.item()
    assert applied_policy(model) is not None
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("kind", NAMES)
def test_batches_follow_the_seed_of_the_trial_and_models_too(kind: str, tasks: dict[str, Task]) -> None:
    task = tasks[kind]

    def drawn(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        model = task.model()
        batches = itertools.islice(BatchStream(task.train_batches), 2)
        labels = [batch["labels"] if isinstance(batch, dict) else batch[1] for batch in batches]
        return [next(model.parameters()).detach(), *labels]

    first, again, other = drawn(5), drawn(5), drawn(6)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(torch.cat(first[1:]), torch.cat(other[1:]))


@pytest.mark.parametrize("kind", NAMES)
def test_the_check_finds_nothing_to_note_and_a_trial_runs_under_fp16(kind: str, tasks: dict[str, Task]) -> None:
    settings = TrialSettings(device="cpu", warmup_steps=1, measured_steps=4, seed=1)
    assert check_task(tasks[kind], settings, num_steps=5) == []
    built: list[weakref.ref[Any]] = []
    build = tasks[kind].model

    def noted() -> Any:
        model = build()
        built.append(weakref.ref(next(model.parameters())))
        return model

    task = dataclasses.replace(tasks[kind], model=noted)
    outcome = run_trial(task, Policy(default="autocast", dtype="fp16"), settings)
    gc.collect()
    assert built
    assert [each() for each in built] == [None] * len(built), "a trial keeps its weights alive"
    assert outcome.kind == "ok", outcome.message
    assert outcome.num_steps_taken == 5
    assert outcome.peak_memory_bytes is not None
    assert outcome.peak_memory_bytes.kind == "computed"


@pytest.mark.parametrize("kind", NAMES)
def test_each_is_searched_and_its_policy_names_units_of_the_model(kind: str, tmp_path: Path) -> None:
    task = resolve_task(NAMES[kind])
    trial = TrialSettings(device="cpu", warmup_steps=1, measured_steps=2, batchnorm_batches=2)
    proof = Proof(looks=(2,), num_steps=3, margin=0.9)
    settings = SearchSettings(
        n_trials=4, output=tmp_path, proof=proof, storage=f"sqlite:///{tmp_path / 'study.db'}", num_workers=1
    )
    plan = prepare_search(task, trial=trial, settings=settings)
    with open_measure(task, timeout_seconds=None) as measure:
        result = run_search(plan, measure)
    assert [record.outcome.kind for record in result.records] == ["ok"] * 4
    names = {name for name, _ in task.model().named_modules()}
    assert plan.space is not None
    assert (tmp_path / "policy.json").is_file()
    tried = {name for record in result.records for name in record.policy.modules if "*" not in name}
    assert tried <= names


def test_the_source_travels_and_other_code_is_another_study(tasks: dict[str, Task], tmp_path: Path) -> None:
    for kind, task in tasks.items():
        assert task.source is not None
        assert task.source.kind == kind
        assert task_identity(task.source.build()) == task_identity(task)
        assert task_identity(task)["code"] is not None


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (
            "lightning:FILE:nothing",
            TaskError,
            "returned Linear; a LightningModule and a Light",
        ),
        ("lightning:FILE:manual_module", TaskError, "automatic_optimization is False"),
        ("lightning:FILE:misspelt_field", TaskError, "nearest: max_grad_norm"),
        ("lightning:FILE:waiting_schedule", TaskError, "ReduceLROnPlateau waits for a metric"),
        ("lightning:FILE:digits_modul", UsageError, "nearest: digits_module"),
        ("trainer:FILE:nothing", TaskError, r"returned Linear; a transformers.Trainer is needed"),
        ("trainer:FILE:half_trainer", TaskError, r"TrainingArguments\(bf16=True\); leave it out"),
        ("trainer:FILE:trainer_without_data", TaskError, "has no eval_dataset"),
        ("trainer:FILE:trainer_with_optimizer", TaskError, "built already"),
    ],
)
def test_a_wrong_function_is_one_clear_error(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve_task(name.replace("FILE", str(FILE)))


def test_a_metric_that_is_not_logged_is_told_with_the_nearest() -> None:
    task = resolve_task(f"lightning:{FILE}:misspelt_metric")
    model = task.model()
    with pytest.raises(TaskError, match="validation_step logged val_loss, val_accuracy; nearest: val_accuracy"):
        evaluate(model, task, device=CPU)


@pytest.mark.parametrize(
    ("name", "kind", "inner"),
    [
        ("lightning:mine.py:make", "lightning", "mine.py:make"),
        ("trainer:pkg.module:make", "trainer", "pkg.module:make"),
        ("mine.py:make", "function", "mine.py:make"),
        ("lightning:make", "function", "lightning:make"),
    ],
)
def test_a_name_says_what_its_function_returns(name: str, kind: str, inner: str) -> None:
    source: Any = source_named(name)
    assert (source.kind, source.arguments["name"]) == (kind, inner)


def test_the_arguments_of_a_step_may_have_any_names() -> None:
    task = resolve_task(f"lightning:{FILE}:free_names")
    model = build_model(task, CPU)
    batch = next(iter(task.train_batches()))
    assert task.loss(model, batch).item() == model.training_step(batch, 0).item()
    with torch.no_grad():
        loss, metric = task.evaluate(model.eval(), next(iter(task.eval_batches())))
    assert math.isfinite(float(loss))
    assert 0 <= float(metric) <= 1

"""Transformers' Trainer under a policy trains as autoprec's own loop does, also over a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the extra `hf` is not installed")
pytest.importorskip("accelerate", reason="the extra `accelerate` is not installed")

from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)

import autoprec
from autoprec import Policy
from autoprec.apply import applied_policy
from autoprec.errors import ApplyError, PrecisionWarning
from autoprec.integrations.trainer import PolicyTrainer, PolicyTraining
from autoprec.probes.dtypes import watch_dtypes
from autoprec.tasks.text import topic_batches
from autoprec.training import ScaleCollapsedError, TrainingStep

pytestmark = pytest.mark.filterwarnings("ignore:.*is emulated here:autoprec.errors.PrecisionWarning")

NUM_STEPS = 100
LENGTH = 48
LR = 3e-3
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
POLICY = Policy(
    default="autocast",
    dtype="fp16",
    modules={
        "bert.embeddings": "fp32",
        "bert.encoder.layer.0": "fp16",
        "bert.encoder.layer.1.output": "bf16",
        "classifier": "fp32",
    },
    grad_scaler={"init_scale": 2.0**12, "growth_interval": 30},
    optimizer={"eps": 1e-6, "amsgrad": True},
)
COMPUTED = {
    "bert.embeddings.LayerNorm": {FP32},
    "bert.encoder.layer.0.attention.self.query": {FP16},
    "bert.encoder.layer.0.output.dense": {FP16},
    "bert.encoder.layer.1.intermediate.dense": {FP16},
    "bert.encoder.layer.1.attention.output.LayerNorm": {FP32},  # as CUDA's autocast computes it
    "bert.encoder.layer.1.output.dense": {BF16},
    "classifier": {FP32},
}


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


class Passages(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Passages of CPython's documentation, padded to one length, with the topic that each is of."""

    def __init__(self, *, held_out: bool = False) -> None:
        batches = topic_batches(num_topics=4, max_length=LENGTH, batch_size=16)[held_out]
        torch.manual_seed(0)
        parts = list(batches())
        padded = [nn.functional.pad(part["tokens"], (0, LENGTH - part["tokens"].shape[1])) for part in parts]
        self.tokens = torch.cat(padded)[:320]
        self.labels = torch.cat([part["labels"] for part in parts])[:320]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": self.labels[index]}


def model(seed: int = 0) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=257,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        num_labels=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


class Recording(PolicyTrainer):
    """A Trainer of the user's own: keeps each micro-batch, its loss, and what units computed in evaluation."""

    loss_is_scaled_for_ga = False  # BERT's loss is the mean of its micro-batch, which the Trainer takes for a share

    def __init__(self, **arguments: Any) -> None:
        self.batches: list[dict[str, torch.Tensor]] = []
        self.losses: list[float] = []
        self.computed: list[dict[str, set[torch.dtype]]] = []
        self.is_watched = False
        super().__init__(**arguments)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.batches.append(dict(inputs))
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.losses.append(float(loss) * self.args.gradient_accumulation_steps)
        return loss

    def compute_loss(self, model: nn.Module, inputs: Any, *arguments: Any, **others: Any) -> Any:
        if not self.is_watched:
            return super().compute_loss(model, inputs, *arguments, **others)
        with autoprec.emulate(), watch_dtypes(model) as log:
            result = super().compute_loss(model, inputs, *arguments, **others)
        self.computed.append({name: set(log[name].computed) for name in COMPUTED})
        return result


def arguments(folder: Path, **others: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 32,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "max_grad_norm": 0.5,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**settings | others)


def trainer(folder: Path, policy: Policy = POLICY, *, net: nn.Module | None = None, **others: Any) -> Recording:
    own = {name: others.pop(name) for name in ("evaluation", "emulates", "lift_half_parameters") if name in others}
    return Recording(
        policy=policy,
        model=model() if net is None else net,
        args=arguments(folder, **others),
        train_dataset=Passages(),
        eval_dataset=Passages(held_out=True),
        **own,
    )


def train_plainly(policy: Policy, batches: list[Any], *, accumulation_steps: int) -> tuple[nn.Module, list[float]]:
    """Train on the Trainer's own micro-batches in autoprec's own loop."""
    net = autoprec.apply_policy(model().train(), policy)
    optimizer = autoprec.build_optimizer(policy, torch.optim.AdamW, net.parameters(), lr=LR, weight_decay=0.0)
    scaler = autoprec.build_grad_scaler(policy, device="cpu")
    step = TrainingStep(optimizer, grad_scaler=scaler, accumulation_steps=accumulation_steps, max_grad_norm=0.5)
    losses = []
    with autoprec.emulate():
        for batch in batches:
            loss = net(**batch).loss
            step(loss)
            losses.append(float(loss.detach()))
    return net, losses


@pytest.mark.parametrize(
    ("policy", "accumulation_steps", "num_batches"),
    [(POLICY, 1, 100), (POLICY, 2, 40), (Policy(default="bf16", modules={"classifier": "fp32"}), 1, 40)],
    ids=["fp16", "fp16 accumulated", "bf16"],
)
def test_the_losses_are_those_of_a_plain_loop(
    policy: Policy, accumulation_steps: int, num_batches: int, tmp_path: Path
) -> None:
    run = trainer(
        tmp_path,
        policy,
        emulates=True,
        gradient_accumulation_steps=accumulation_steps,
        max_steps=num_batches // accumulation_steps,
    )
    run.train()
    plain, expected = train_plainly(policy, run.batches, accumulation_steps=accumulation_steps)
    assert len(run.losses) == num_batches
    assert run.losses == pytest.approx(expected, abs=1e-3)
    if num_batches == NUM_STEPS:
        assert sum(expected[-10:]) < sum(expected[:10]) - 0.5  # of 10 ln 4
    for (name, trained), (_, parameter) in zip(run.model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(trained, parameter, atol=1e-3, rtol=0.0, msg=name)


@pytest.mark.parametrize("evaluation", ["policy", "fp32"])
def test_each_unit_computes_in_the_policys_precision_and_evaluation_as_asked(evaluation: Any, tmp_path: Path) -> None:
    run = trainer(tmp_path, evaluation=evaluation, max_steps=1)
    run.is_watched = True
    run.train()
    assert run.computed == [COMPUTED]
    metrics = run.evaluate()
    fp32 = {name: {FP32} for name in COMPUTED}
    assert all(found == (COMPUTED if evaluation == "policy" else fp32) for found in run.computed[1:])
    assert len(run.computed) > 2
    assert math.isfinite(metrics["eval_loss"])
    assert applied_policy(run.model) == POLICY


def test_the_policys_scaler_and_optimizer_settings_are_used_whatever_the_arguments_say(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=65, adam_epsilon=1e-3, optim="adamw_torch_fused")
    run.train()
    assert [(group["eps"], group["amsgrad"]) for group in run.optimizer.param_groups] == [(1e-6, True)] * 2
    assert run.accelerator.scaler.get_scale() == 2.0**14  # 2**12, doubled at 30 and 60 good steps


def test_a_training_that_goes_on_from_a_checkpoint_ends_as_one_that_was_not_broken_off(tmp_path: Path) -> None:
    whole = trainer(tmp_path, save_strategy="steps", save_steps=35, max_steps=60)
    whole.train()
    rest = trainer(tmp_path / "rest", net=model(seed=1), max_steps=60)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-35"))
    assert rest.losses == whole.losses[35:]
    for (name, one), (_, other) in zip(whole.model.named_parameters(), rest.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    assert rest.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()


def test_fp16_on_a_cpu_is_emulated_and_said(tmp_path: Path) -> None:
    with pytest.warns(PrecisionWarning, match=r"half precision \(BF16 and FP16\) on a CPU is emulated here"):
        trainer(tmp_path, max_steps=1).train()


@pytest.mark.parametrize("name", ["bf16", "fp16_full_eval", "bf16_full_eval"])
def test_a_second_precision_setting_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(ApplyError, match=rf"TrainingArguments\({name}=True\) is a second precision setting"):
        trainer(tmp_path, **{name: True})


def test_mixed_precision_from_the_environment_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ApplyError, match="mixed_precision is 'bf16'"):
        trainer(tmp_path)


def test_several_gpus_in_one_process_are_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ApplyError, match="2 GPUs in one process are DataParallel"):
        PolicyTrainer(policy=POLICY, model=model(), args=args, train_dataset=Passages())


def test_another_policy_on_the_model_is_an_error(tmp_path: Path) -> None:
    run = trainer(tmp_path, net=autoprec.apply_policy(model(), Policy(default="bf16")))
    with pytest.raises(ApplyError, match="two precision settings"):
        run.train()


def test_weights_in_bf16_are_refused_or_lifted(tmp_path: Path) -> None:
    with pytest.raises(ApplyError, match="cannot be masters"):
        trainer(tmp_path, net=model().bfloat16(), max_steps=1).train()
    run = trainer(tmp_path, net=model().bfloat16(), max_steps=1, lift_half_parameters=True)
    run.train()
    assert {parameter.dtype for parameter in run.model.parameters()} == {FP32}


def test_a_model_that_is_made_by_a_function_gets_the_policy_each_time(tmp_path: Path) -> None:
    run = PolicyTrainer(
        policy=POLICY, model_init=lambda: model(), args=arguments(tmp_path, max_steps=1), train_dataset=Passages()
    )
    for _ in range(2):
        run.train()
        assert applied_policy(run.model) == POLICY


def test_a_scale_that_runs_to_zero_ends_the_training(tmp_path: Path) -> None:
    net = model()
    with torch.no_grad():
        net.bert.encoder.layer[0].output.dense.weight.mul_(1e9)
    with pytest.raises(ScaleCollapsedError, match="loss scale collapsed at step"):
        trainer(tmp_path, net=net).train()


def test_another_trainer_takes_the_policy_from_the_class_before_it(tmp_path: Path) -> None:
    class Mine(PolicyTraining, Seq2SeqTrainer):
        pass

    args = Seq2SeqTrainingArguments(**arguments(tmp_path, max_steps=2).to_dict() | {"use_cpu": True})
    run = Mine(policy=POLICY, model=model(), args=args, train_dataset=Passages())
    run.train()
    assert applied_policy(run.model) == POLICY
    assert run.optimizer.param_groups[0]["amsgrad"] is True
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'policy'"):
        Mine(model=model(), args=args)

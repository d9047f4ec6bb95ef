"""Training options in a trial: same numbers, less memory, recorded; what cannot be followed ends before a trial."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_tasks import small_task
from torch import nn

from autoprec.errors import TaskError, UsageError
from autoprec.policy import Policy, Precision
from autoprec.search.fingerprint import study_identity
from autoprec.search.plan import SearchSettings, prepare_search
from autoprec.tasks.options import training_options
from autoprec.trials import run_trial
from autoprec.trials.building import build_model, prepare_batch
from autoprec.trials.compiling import check_compile
from autoprec.trials.outcome import Outcome, TrialSettings

SETTINGS = TrialSettings(warmup_steps=1, measured_steps=3, batchnorm_batches=1)
POLICIES = {"fp32": Policy(default="fp32"), "fp16": Policy(default="fp16"), "autocast": Policy(default="autocast")}


def outcome(policy: Policy, **changes: Any) -> Outcome:
    found = run_trial(small_task(**changes), policy, SETTINGS)
    assert found.kind == "ok", found.message
    return found


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_checkpointing_changes_no_loss(policy: Policy) -> None:
    assert outcome(policy, checkpoint=["0", "2"]).train_losses == outcome(policy).train_losses


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("implementation", ["foreach", "fused", "for-loop"])
def test_the_implementations_of_an_optimizer_agree(policy: Policy, implementation: str) -> None:
    found = outcome(policy, optimizer_implementation=implementation, max_grad_norm=0.5)
    assert found.train_losses == pytest.approx(outcome(policy, max_grad_norm=0.5).train_losses, rel=1e-5)


def test_an_inf_step_is_skipped_by_every_implementation() -> None:
    def overflowing(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss * (1e38 if batch is spoiled else 1.0)

    batches = small_task().train_batches
    assert isinstance(batches, list)
    spoiled = batches[1]
    found = [
        outcome(
            POLICIES["fp16"],
            train_batches=batches,
            loss=overflowing,
            optimizer_implementation=name,
            max_grad_norm=norm,
        )
        for name in ("foreach", "fused", "for-loop")
        for norm in (None, 1.0)
    ]
    assert [each.num_steps_skipped for each in found] == [1] * 6
    for norm in (0, 1):
        same = [each.train_losses[-1] for each in found[norm::2]]
        assert same == pytest.approx([same[0]] * 3, rel=1e-5)


class _Images(nn.Module):
    """Notes the memory format of what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 2)
        self.formats: set[bool] = set()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.formats.add(images.is_contiguous(memory_format=torch.channels_last))
        return self.head(self.convolution(images).relu().mean((2, 3)))


def image_task(**changes: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(8, 3, 6, 6, generator=generator), torch.arange(8) % 2) for _ in range(3)]
    return small_task(model=_Images, train_batches=batches, eval_batches=batches, **changes)


def test_channels_last_reaches_weights_and_images_and_keeps_the_losses() -> None:
    task = image_task(channels_last=True)
    model = build_model(task, torch.device("cpu"))
    images, labels = prepare_batch(task, task.train_batches[0], torch.device("cpu"))
    assert model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
    task.loss(model, (images, labels))
    assert model.formats == {True}
    found, plain = (run_trial(each, POLICIES["fp16"], SETTINGS) for each in (task, image_task()))
    assert found.train_losses == pytest.approx(plain.train_losses, rel=1e-3)


@pytest.mark.parametrize(
    ("backend", "default"), [("eager", "fp32"), ("eager", "bf16"), ("aot_eager", "autocast")], ids=str
)
def test_a_compiled_trial_gives_the_losses_of_an_eager_one(backend: str, default: Precision) -> None:
    policy = Policy(default=default, dtype="bf16")
    plain = run_trial(small_task(), policy, SETTINGS.model_copy(update={"emulate": False}))
    found = run_trial(small_task(compile=backend), policy, SETTINGS.model_copy(update={"emulate": False}))
    assert found.kind == "ok", found.message
    assert found.train_losses == pytest.approx(plain.train_losses, rel=1e-3)
    assert any("torch.compile" in note for note in found.notes)


def test_compile_really_compiles_and_nothing_stays_alive() -> None:
    graphs: list[int] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    torch._dynamo.register_backend(counting, name="counting")
    found = outcome(POLICIES["fp32"], compile="counting")
    assert found.kind == "ok"
    assert graphs


def test_tf32_is_switched_for_the_trial_alone_and_told_not_to_be_emulated() -> None:
    seen: set[str] = set()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.update({torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision})
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    before = (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.rnn.fp32_precision)
    found = outcome(POLICIES["fp32"], tf32=True, loss=loss)
    assert seen == {"tf32"}
    assert (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.rnn.fp32_precision) == before
    assert any("TF32 is not emulated" in note for note in found.notes)
    slower = outcome(POLICIES["fp32"], tf32=False).throughput_samples_per_second
    assert slower is not None
    assert found.throughput_samples_per_second is not None
    assert slower.value <= found.throughput_samples_per_second.value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer_implementation": "fuse"}, "is 'fuse'; allowed: foreach, fused, for-loop; nearest: fused"),
        ({"channels_last": "yes"}, "task 'small': channels_last is 'yes'"),
        ({"checkpoint": [1]}, "task 'small': checkpoint"),
        ({"checkpoint": 3}, "a list of module names is needed"),
        ({"compile": True}, "task 'small': compile is True"),
        ({"tf32": 1}, "task 'small': tf32 is 1"),
    ],
)
def test_a_wrong_option_says_which_field_and_what_is_allowed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        small_task(**changes)


def test_a_name_that_is_not_there_ends_before_the_first_trial() -> None:
    with pytest.raises(TaskError, match=r"checkpoint 'block\.\*' matches no module"):
        prepare_search(small_task(checkpoint=["block.*"]), trial=SETTINGS, settings=SearchSettings())


def test_an_optimizer_without_the_implementation_says_so() -> None:
    task = small_task(optimizer=torch.optim.RMSprop, optimizer_implementation="fused")
    found = run_trial(task, POLICIES["fp32"], SETTINGS)
    assert found.kind == "user_error"
    assert "RMSprop has no fused implementation" in found.message
    own = small_task(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), optimizer_implementation="fused")
    assert "give fused=True to the optimizer in it" in run_trial(own, POLICIES["fp32"], SETTINGS).message


class TestCompileBackends:
    def test_an_unknown_one_gives_the_nearest(self) -> None:
        with pytest.raises(UsageError, match=r"compile backend 'induktor'; allowed: .*nearest: inductor"):
            check_compile(small_task(compile="induktor"), torch.device("cpu"))

    def test_one_that_cannot_compile_here_says_which_need_no_compiler(self) -> None:
        def broken(graph: Any, inputs: Any) -> Any:
            raise RuntimeError("No working C++ compiler found")

        torch._dynamo.register_backend(broken, name="broken_backend")
        with pytest.raises(
            UsageError, match=r"cannot compile for cpu here \(.*C\+\+ compiler.*eager and aot_eager need"
        ):
            check_compile(small_task(compile="broken_backend"), torch.device("cpu"))


def test_options_are_part_of_the_studys_identity_and_a_plain_task_has_none() -> None:
    plain = prepare_search(small_task(), trial=SETTINGS, settings=SearchSettings())
    changed = prepare_search(
        small_task(checkpoint=["0"], compile="eager", tf32=True), trial=SETTINGS, settings=SearchSettings()
    )
    assert changed.study_name != plain.study_name
    assert {key for key in changed.identity if key not in plain.identity} == {
        "task.checkpoint",
        "task.compile",
        "task.tf32",
    }
    assert training_options(small_task()).changed == {}
    assert study_identity(a={"b": 1}) == {"a.b": 1}

"""What the policy sampler finds at the target shape against stock autocast of the same dtype, computed.

    python benchmarks/recommended.py [--dtype bf16] [--trials 16] [--models vit_b_16 resnet50] [--optimizers adamw sgd]
                                     [--gpu a100-80] [--no-proof]

The search's own loop, where a trial is the estimate of one step at the target shape (memory computed, throughput
predicted for the GPU) and nothing is trained: what precision alone can save. The policy that takes the least memory is
then proved on a sibling of the same layers, fewer and narrower: the same rules, trained with half emulated. BERT and
GPT-2 are transformers' (the extra `hf`).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import optuna
import torch
from torch import nn
from torchvision.models import ConvNeXt, VisionTransformer
from torchvision.models.convnext import CNBlockConfig

from autoprec import verify_policy
from autoprec.policy import Number, Policy
from autoprec.profiling.run import take_profile
from autoprec.search.events import Events
from autoprec.search.pipeline import open_search
from autoprec.search.plan import SearchPlan, SearchSettings, prepare_search
from autoprec.search.profile_prior import learn_from_profile
from autoprec.search.runner import run_trials
from autoprec.search.samplers import quiet_optuna
from autoprec.search.space import AskedDtype
from autoprec.search.study import SearchStudy, TrialRecord
from autoprec.search.study_dtype import DTYPES
from autoprec.tasks.named import named_task
from autoprec.tasks.protocol import TargetShape, Task
from autoprec.tasks.source import TaskSource
from autoprec.trials import run_trial
from autoprec.trials.outcome import Outcome, TrialSettings
from autoprec.trials.target import target_figures


@dataclass(frozen=True)
class Case:
    """A model at the batch of its real run; `sibling` is a small task with layers of the same names."""

    batch_size: int
    build: Callable[[str, int], Task]
    sibling: Callable[[str], Task] | None = None


def vision(model: str) -> Callable[[str, int], Task]:
    def build(optimizer: str, batch_size: int) -> Task:
        settings = {"model": model, "optimizer": optimizer, "target_batch_size": batch_size, "lr": 1e-3}
        return TaskSource("vision", settings).build()

    return build


def language(architecture: str, length: int) -> Callable[[str, int], Task]:
    """Return how to build a language model of transformers' default size (BERT-base, GPT-2 small) on random tokens."""

    def build(optimizer: str, batch_size: int) -> Task:
        import transformers

        kinds = {
            "bert": (transformers.BertConfig, transformers.BertForMaskedLM),
            "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
        }
        configuration, model = kinds[architecture]
        vocabulary = configuration().vocab_size

        def tokens(samples: int, positions: int) -> torch.Tensor:
            return torch.randint(vocabulary, (samples, positions), generator=torch.Generator().manual_seed(0))

        def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            logits = module(input_ids=batch).logits
            return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())

        batches = [tokens(2, 64) for _ in range(4)]
        return Task(
            name=architecture,
            model=lambda: model(configuration(use_cache=False)),
            train_batches=batches,
            eval_batches=batches,
            loss=loss,
            optimizer=OPTIMIZERS[optimizer][0],
            optimizer_settings=OPTIMIZERS[optimizer][1],
            target=TargetShape(make_batch=lambda: tokens(batch_size, length), batch_size=batch_size),
        )

    return build


OPTIMIZERS = {"adamw": (torch.optim.AdamW, {"lr": 1e-3}), "sgd": (torch.optim.SGD, {"lr": 2e-2, "momentum": 0.9})}
MARGIN, NUM_STEPS = 0.05, 160
"""Of the proof on the sibling: accuracy, and steps of each run, where `--steps` names no other."""


@dataclass(frozen=True)
class Computed:
    """A measurement that trains nothing: the estimate at the target shape, and the same accuracy for all."""

    plan: SearchPlan

    def __call__(self, policy: Policy, settings: TrialSettings) -> Outcome:
        figures = target_figures(self.plan.task, policy, settings)
        return Outcome(
            kind="ok",
            peak_memory_bytes=figures.peak_memory_bytes,
            throughput_samples_per_second=figures.throughput_samples_per_second,
            accuracy=Number(value=0.5, kind="computed"),
            eval_loss=Number(value=1.0, kind="computed"),
            num_steps_taken=1,
        )


def search(name: str, optimizer: str, *, trials: int, dtype: AskedDtype, gpu: str) -> Policy:
    """Search, print, and return the policy that takes the least memory of those no slower than autocast."""
    case = CASES[name]
    task = case.build(optimizer, case.batch_size)
    settings = SearchSettings(n_trials=trials, prefer="balanced", dtype=dtype)
    plan = prepare_search(task, trial=TrialSettings(gpu=gpu), settings=settings)
    profile = take_profile(task, list(dict.fromkeys(plan.unit_calls)), plan.trial)
    lessons = learn_from_profile(
        profile, plan.parameters, plan.unit_calls, max_loss_gap=plan.settings.limits.max_loss_gap
    )
    study = open_search(plan, optuna.storages.InMemoryStorage(), lessons)
    run_trials(study, Computed(plan), arms=plan.arms, n_trials=trials, settings=plan.trial, events=Events())
    report(f"{name}, batch {case.batch_size}, {optimizer}, {plan.parameters.dtype}", study, profile.wall_seconds)
    return best_beside_autocast(study)


def best_beside_autocast(study: SearchStudy) -> Policy:
    """Return the policy with the least memory whose predicted throughput is at least stock autocast's."""
    autocast = next(record for record in study.records if record.arm == f"autocast {study.parameters.families[0]}")
    fast = [record for record in study.records if figures(record)[1] >= figures(autocast)[1]]
    best = min(fast, key=lambda record: figures(record)[0])
    memory, speed = (own / its - 1 for own, its in zip(figures(best), figures(autocast), strict=True))
    print(f"  recommended: {best.label}: memory {memory:+.2%} computed, throughput {speed:+.2%} predicted", flush=True)
    return best.policy


def sibling() -> VisionTransformer:
    """A vision transformer with vit_b_16's layers: 3 blocks of 64 channels, 4 heads, patches of 8 in 32 px."""
    return VisionTransformer(
        image_size=32, patch_size=8, num_layers=3, num_heads=4, hidden_dim=64, mlp_dim=256, num_classes=10
    )


def small_convnext() -> ConvNeXt:
    """A ConvNeXt with convnext_tiny's layers: two stages of two blocks, 48 and 96 channels."""
    return ConvNeXt([CNBlockConfig(48, 96, 2), CNBlockConfig(96, None, 2)], num_classes=10)


def vision_sibling(name: str, model: Callable[[], nn.Module]) -> Callable[[str], Task]:
    def build(optimizer: str) -> Task:
        settings = {"model": name, "optimizer": optimizer, "lr": OPTIMIZERS[optimizer][1]["lr"]}
        return replace(TaskSource("vision", settings).build(), name=f"sibling of {name}", model=model, target=None)

    return build


def language_sibling(architecture: str) -> Callable[[str], Task]:
    def build(optimizer: str) -> Task:
        return named_task(f"hf:{architecture}", optimizer=optimizer, lr=OPTIMIZERS[optimizer][1]["lr"])

    return build


CASES = {
    "vit_b_16": Case(64, vision("vit_b_16"), vision_sibling("vit_b_16", sibling)),
    "bert-base": Case(32, language("bert", 512), language_sibling("bert")),
    "gpt2-small": Case(8, language("gpt2", 1024), language_sibling("gpt2")),
    "convnext_tiny": Case(64, vision("convnext_tiny"), vision_sibling("convnext_tiny", small_convnext)),
    "resnet50": Case(128, vision("resnet50")),
}


def prove_on_sibling(name: str, policy: Policy, optimizer: str, *, num_steps: int) -> None:
    """Train the sibling under the policy's rules, those of blocks that it lacks left out, and print the verdict."""
    build = CASES[name].sibling
    if build is None:
        return
    task = build(optimizer)
    names = {module for module, _ in task.model().named_modules()}
    rules = {module: choice for module, choice in policy.modules.items() if module in names}
    with tempfile.TemporaryDirectory() as folder:
        proof = verify_policy(
            policy.replace(modules=rules),
            task,
            margin=MARGIN,
            num_steps=num_steps,
            output=Path(folder),
            measure=lambda own, settings: run_trial(task, own, settings),
        )
    print(f"  sibling, {optimizer}, {num_steps} steps, {len(rules)} rules, emulated: {proof.sentence}", flush=True)


def report(title: str, study: SearchStudy, profile_seconds: float) -> None:
    """Print every arm, and the found policies that no other beats."""
    autocast = next(record for record in study.records if record.arm == f"autocast {study.parameters.families[0]}")
    front = {record.number for record in study.front()}
    print(f"{title}; {study.num_finished} trials, profile {profile_seconds:.1f} s", flush=True)
    for record in study.records:
        if record.is_cached or not (record.arm or record.number in front):
            continue
        memory, speed = figures(record)
        saved, gained = memory / figures(autocast)[0] - 1, speed / figures(autocast)[1] - 1
        print(f"  {record.label:26} {memory / 2**30:6.2f} GiB computed ({saved:+7.2%} against autocast), ", end="")
        print(f"throughput {gained:+7.2%} predicted; {len(record.policy.modules)} rules", flush=True)


def figures(record: TrialRecord) -> tuple[float, float]:
    memory, speed = record.outcome.peak_memory_bytes, record.outcome.throughput_samples_per_second
    assert memory is not None
    assert speed is not None
    return memory.value, speed.value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--models", nargs="*", default=["vit_b_16", "resnet50"], choices=list(CASES))
    parser.add_argument("--optimizers", nargs="*", default=["adamw", "sgd"], choices=list(OPTIMIZERS))
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    parser.add_argument("--gpu", default="a100-80")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--no-proof", action="store_true")
    arguments = parser.parse_args()
    quiet_optuna()
    for name in arguments.models:
        for optimizer in arguments.optimizers:
            settings = {"trials": arguments.trials, "dtype": arguments.dtype, "gpu": arguments.gpu}
            policy = search(name, optimizer, **settings)
            if not arguments.no_proof:
                prove_on_sibling(name, policy, optimizer, num_steps=arguments.steps)


if __name__ == "__main__":
    main()

"""What the policy sampler finds at the target shape against stock autocast, computed: vit_b_16 and resnet50.

    python benchmarks/recommended.py [--trials 16] [--cases 0 1 2 3] [--no-proof]

The search's own loop, where a trial is the estimate of one step at 224 px (memory computed, throughput predicted for an
A100) and nothing is trained: what precision alone can save. The policy of vit_b_16 that takes the least memory is then
proved on a sibling of the same layers, fewer and narrower: the same rules, trained on digits with FP16 emulated.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import optuna
from torchvision.models import VisionTransformer

from autoprec import verify_policy
from autoprec.policy import Number, Policy
from autoprec.profiling.run import take_profile
from autoprec.search.events import Events
from autoprec.search.pipeline import open_search
from autoprec.search.plan import SearchPlan, SearchSettings, prepare_search
from autoprec.search.profile_prior import learn_from_profile
from autoprec.search.runner import run_trials
from autoprec.search.samplers import quiet_optuna
from autoprec.search.study import SearchStudy, TrialRecord
from autoprec.tasks.source import TaskSource
from autoprec.trials import run_trial
from autoprec.trials.outcome import Outcome, TrialSettings
from autoprec.trials.target import target_figures

CASES = (("vit_b_16", "adamw", 64), ("vit_b_16", "sgd", 64), ("resnet50", "adamw", 128), ("resnet50", "sgd", 128))


MARGIN, NUM_STEPS = 0.05, 160
"""Of the proof on the sibling: accuracy, and steps of each run."""


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


def search(model: str, optimizer: str, batch_size: int, *, trials: int) -> Policy:
    """Search, print, and return the policy that takes the least memory of those no slower than autocast."""
    arguments = {"model": model, "optimizer": optimizer, "target_batch_size": batch_size, "lr": 1e-3}
    task = TaskSource("vision", arguments).build()
    plan = prepare_search(task, trial=TrialSettings(), settings=SearchSettings(n_trials=trials, prefer="balanced"))
    profile = take_profile(task, list(dict.fromkeys(plan.unit_calls)), plan.trial)
    lessons = learn_from_profile(
        profile, plan.parameters, plan.unit_calls, max_loss_gap=plan.settings.limits.max_loss_gap
    )
    study = open_search(plan, optuna.storages.InMemoryStorage(), lessons)
    run_trials(study, Computed(plan), arms=plan.arms, n_trials=trials, settings=plan.trial, events=Events())
    report(f"{model}, batch {batch_size}, {optimizer}", study, profile.wall_seconds)
    return best_beside_autocast(study)


def best_beside_autocast(study: SearchStudy) -> Policy:
    """Return the policy with the least memory whose predicted throughput is at least stock autocast's."""
    autocast = next(record for record in study.records if record.arm == "autocast fp16")
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


def prove_on_sibling(policy: Policy, optimizer: str) -> None:
    """Train the sibling under the policy's rules, those of blocks that it lacks left out, and print the verdict."""
    names = {name for name, _ in sibling().named_modules()}
    rules = {name: choice for name, choice in policy.modules.items() if name in names}
    lr = 1e-3 if optimizer == "adamw" else 2e-2
    task = TaskSource("vision", {"model": "vit_b_16", "optimizer": optimizer, "lr": lr}).build()
    task = replace(task, name="sibling of vit_b_16", model=sibling, target=None)
    with tempfile.TemporaryDirectory() as folder:
        proof = verify_policy(
            policy.replace(modules=rules),
            task,
            margin=MARGIN,
            num_steps=NUM_STEPS,
            output=Path(folder),
            measure=lambda own, settings: run_trial(task, own, settings),
        )
    print(f"  sibling, {optimizer}, {NUM_STEPS} steps, {len(rules)} rules, emulated: {proof.sentence}", flush=True)


def report(title: str, study: SearchStudy, profile_seconds: float) -> None:
    """Print every arm, and the found policies that no other beats."""
    autocast = next(record for record in study.records if record.arm == "autocast fp16")
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
    parser.add_argument("--cases", type=int, nargs="*", default=list(range(len(CASES))))
    parser.add_argument("--no-proof", action="store_true")
    arguments = parser.parse_args()
    quiet_optuna()
    for case in arguments.cases:
        model, optimizer, batch_size = CASES[case]
        policy = search(model, optimizer, batch_size, trials=arguments.trials)
        if model == "vit_b_16" and not arguments.no_proof:
            prove_on_sibling(policy, optimizer)


if __name__ == "__main__":
    main()

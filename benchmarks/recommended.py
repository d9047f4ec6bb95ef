"""What the policy sampler finds at the target shape against stock autocast, computed: vit_b_16 and resnet50.

    python benchmarks/recommended.py [--trials 16]

The search's own loop, where a trial is the estimate of one step at 224 px (memory computed, throughput predicted for an
A100) and nothing is trained: what precision alone can save. Accuracy is what a search proves.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import optuna

from autoprec.policy import Number, Policy
from autoprec.profiling.run import take_profile
from autoprec.search.events import Events
from autoprec.search.pipeline import PREFERENCE_WEIGHTS
from autoprec.search.plan import SearchPlan, SearchSettings, prepare_search
from autoprec.search.profile_prior import learn_from_profile
from autoprec.search.runner import run_trials
from autoprec.search.samplers import build_sampler, quiet_optuna
from autoprec.search.study import SearchStudy, TrialRecord, open_study
from autoprec.tasks.source import TaskSource
from autoprec.trials.outcome import Outcome, TrialSettings
from autoprec.trials.target import target_figures

CASES = (("vit_b_16", "adamw", 64), ("vit_b_16", "sgd", 64), ("resnet50", "adamw", 128), ("resnet50", "sgd", 128))


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


def search(model: str, optimizer: str, batch_size: int, *, trials: int) -> None:
    arguments = {"model": model, "optimizer": optimizer, "target_batch_size": batch_size, "lr": 1e-3}
    task = TaskSource("vision", arguments).build()
    plan = prepare_search(task, trial=TrialSettings(), settings=SearchSettings(n_trials=trials, prefer="balanced"))
    profile = take_profile(task, list(dict.fromkeys(plan.unit_calls)), plan.trial)
    lessons = learn_from_profile(
        profile, plan.parameters, plan.unit_calls, max_loss_gap=plan.settings.limits.max_loss_gap
    )
    sampler = build_sampler(
        "policy",
        seed=0,
        fixed={**plan.parameters.defaults, **plan.parameters.fixed},
        prior=lessons.prior,
        preference=PREFERENCE_WEIGHTS["smallest"],
        reciprocal=[1],
    )
    storage = optuna.storages.InMemoryStorage()
    study = open_study(
        storage,
        name=plan.study_name,
        identity=plan.identity,
        sampler=sampler,
        parameters=plan.parameters,
        limits=plan.settings.limits,
    )
    run_trials(study, Computed(plan), arms=plan.arms, n_trials=trials, settings=plan.trial, events=Events())
    report(f"{model}, batch {batch_size}, {optimizer}", study, profile.wall_seconds)


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
    arguments = parser.parse_args()
    quiet_optuna()
    for case in arguments.cases:
        search(*CASES[case], trials=arguments.trials)


if __name__ == "__main__":
    main()

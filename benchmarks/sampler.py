"""How much of the gain there is each sampler finds: synthetic problems with an exact optimum, and a real network.

    python benchmarks/sampler.py synthetic [--seeds 5] [--trials 30] [--samplers "policy;tpe;nsga2;gp;random"]
    python benchmarks/sampler.py real [--seeds 5] [--real-trials 20]

Synthetic: every sampler gets the same three first trials (FP32, autocast and half everywhere) and the same
measurements. The policy sampler also gets a profile whose errors are those of benchmarks/chains.py;
"policy, no profile" does without.

Real: the search's own loop over the network of benchmarks/small_network.py, whose every policy was measured once
(data/small_network.json): share of the true front's hypervolume, beyond FP32's memory and throughput, and beyond the
worst of all policies', each time beyond the accuracy of a guess. The policy sampler's profile is taken from the
network.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence

import chains
import numpy as np
import optuna
import small_network

from autoprec.policy import Number, Policy
from autoprec.profiling.profile import Profile
from autoprec.profiling.run import take_profile
from autoprec.search.events import Events
from autoprec.search.plan import SearchPlan
from autoprec.search.policy_sampler import PolicySampler
from autoprec.search.profile_prior import learn_from_profile, plain_prior
from autoprec.search.runner import run_trials
from autoprec.search.samplers import build_sampler, quiet_optuna
from autoprec.search.scoring import Limits, constraint_values
from autoprec.search.study import open_study
from autoprec.trials.outcome import Outcome, TrialSettings

DIRECTIONS = ("minimize", "maximize", "maximize")
PREFERENCE = (1.0, 1.0, 0.0)
SAMPLERS = ("policy", "policy, no profile", "tpe", "nsga2", "gp", "random")
THROUGHPUT = "throughput_samples_per_second"
REACHED = 0.85
GUESS = 0.1
"""Accuracy of a guess among ten digits."""


def make_sampler(name: str, problem: chains.Problem, seed: int) -> optuna.samplers.BaseSampler:
    if not name.startswith("policy"):
        return build_sampler(name, seed=seed)
    prior = problem.profile(np.random.default_rng([seed, 1])) if name == "policy" else None
    return PolicySampler(seed=seed, prior=prior, preference=PREFERENCE, reciprocal=[1])


def run(
    problem: chains.Problem, sampler: optuna.samplers.BaseSampler, *, trials: int, seed: int
) -> tuple[list[float], float]:
    """Return the best true gain after each trial, and the mean seconds of a suggestion."""
    study = optuna.create_study(directions=list(DIRECTIONS), sampler=sampler)
    for choice in chains.CHOICES:
        study.enqueue_trial(dict.fromkeys(problem.distributions, choice))
    noise = np.random.default_rng([seed, 2])
    best, gains, seconds = 0.0, [], []
    fp32 = problem.evaluate(np.zeros(chains.NUM_UNITS, dtype=int))
    for _ in range(trials):
        started = time.thread_time()
        trial = study.ask(fixed_distributions=problem.distributions)
        seconds.append(time.thread_time() - started)
        chosen = np.array([chains.CHOICES.index(trial.params[problem.parameter(u)]) for u in range(chains.NUM_UNITS)])
        best = max(best, problem.gain(chosen))
        gains.append(best)
        tell(study, trial, problem, problem.evaluate(chosen), fp32, noise)
    return gains, statistics.mean(seconds[3:])


def tell(study, trial, problem, found, fp32, noise: np.random.Generator) -> None:
    """Tell what a real study tells: worst values for a training that failed, with the first bad unit."""
    memory, step_time, loss, bad = found
    trial.set_constraint("finite", -1.0 if bad is None else 1.0)
    if bad is not None:
        trial.set_user_attr("failed_unit", problem.parameter(bad))
        trial.set_constraint("loss_gap", 0.5)
        study.tell(trial, [2 * fp32[0], 0.0, 0.0])
        return
    used = loss / chains.LOSS_LIMIT + problem.loss_noise * noise.standard_normal()
    trial.set_constraint("loss_gap", 0.5 * (used - 1.0))
    speed = 1000.0 / (step_time * np.exp(problem.time_noise * noise.standard_normal()))
    study.tell(trial, [memory, float(speed), float(0.8 - 0.05 * used + 0.01 * noise.standard_normal())])


def synthetic(samplers: Sequence[str], arguments: argparse.Namespace, kinds: Sequence[Callable]) -> None:
    """Stock samplers run `--stock-trials` to see when they get there; the shares are those after `--trials`."""
    seeds, trials = arguments.seeds, arguments.trials
    print(f"share of the reachable gain: median and worst of {seeds} seeds; trials until it is {REACHED}")
    pooled: dict[str, list[tuple[float, float, float]]] = {name: [] for name in samplers}
    for make in kinds:
        problems = [make(np.random.default_rng([seed, 0])) for seed in range(seeds)]
        optima = [problem.optimum() for problem in problems]
        for name in samplers:
            rows, cost = [], []
            for seed in range(seeds if name != "gp" else min(seeds, arguments.gp_seeds)):
                problem = problems[seed]
                count = trials if name.startswith("policy") or name == "gp" else arguments.stock_trials
                gains, seconds = run(problem, make_sampler(name, problem, seed), trials=count, seed=seed)
                share = np.array(gains) / optima[seed]
                reached = float(np.argmax(share >= REACHED) + 1) if (share >= REACHED).any() else np.inf
                rows.append((share[14], share[trials - 1], reached))
                cost.append(seconds)
            pooled[name] += rows if make in chains.FRIENDLY else []
            report(problem.name, name, rows, trials, f"{1e3 * np.mean(cost):6.1f} ms a suggestion")
    for name, rows in pooled.items():
        if rows:
            report("all friendly", name, rows, trials)


def report(problem: str, name: str, rows: Sequence[tuple[float, float, float]], trials: int, more: str = "") -> None:
    early, late, reached = np.array(rows).T
    print(
        f"{problem:13} {name:19} after 15: {np.median(early):4.2f} {early.min():4.2f}   after {trials}: "
        f"{np.median(late):4.2f} {late.min():4.2f}   trials to {REACHED}: {np.median(reached):4.0f}   {more}",
        flush=True,
    )


class Measured:
    """The outcome of every policy of the small network, from its file."""

    def __init__(self, plan: SearchPlan) -> None:
        rows = json.loads(small_network.DATA.read_text())
        self.outcomes = {key: Outcome.model_validate(row) for key, row in rows.items()}
        self._key = plan.parameters.key

    def __call__(self, policy: Policy, settings: TrialSettings) -> Outcome:
        plain = policy.replace(grad_scaler=None, optimizer=None)
        return self.outcomes.get(self._key(policy)) or self.outcomes[self._key(plain)]


def real(samplers: Sequence[str], arguments: argparse.Namespace) -> None:
    if not small_network.DATA.exists():
        print("real: the network's policies are not measured yet: python benchmarks/small_network.py")
        return
    plan = small_network.plan()
    measure = Measured(plan)
    fp32 = measure(plan.arms[0].policy, plan.trial)
    feasible = [o for o in measure.outcomes.values() if is_feasible(o, fp32)]
    worst = fp32.model_copy(update={name: worst_of(feasible, name) for name in ("peak_memory_bytes", THROUGHPUT)})
    print(f"{len(measure.outcomes)} policies, {len(feasible)} feasible; share of the true front's hypervolume")
    profile = take_profile(plan.task, list(dict.fromkeys(plan.unit_calls)), plan.trial)
    for name in samplers:
        shares: list[tuple[float, float]] = []
        seconds = []
        for seed in range(arguments.seeds):
            study = open_study(
                optuna.storages.InMemoryStorage(),
                name=f"{name} {seed}",
                identity=plan.identity,
                sampler=real_sampler(name, plan, profile, seed),
                parameters=plan.parameters,
                limits=plan.settings.limits,
            )
            started = time.thread_time()
            run_trials(
                study, measure, arms=plan.arms, n_trials=arguments.real_trials, settings=plan.trial, events=Events()
            )
            seconds.append((time.thread_time() - started) / len(study.records))
            seen = [r.outcome for r in study.records if is_feasible(r.outcome, fp32)]
            shares.append((share_found(seen, feasible, fp32), share_found(seen, feasible, worst)))
        beyond_fp32, beyond_worst = np.array(shares).T
        print(
            f"{name:19} after {arguments.real_trials}: beyond FP32 median {np.median(beyond_fp32):6.4f} worst "
            f"{beyond_fp32.min():6.4f}; beyond the worst policy median {np.median(beyond_worst):6.4f} worst "
            f"{beyond_worst.min():6.4f}; {1e3 * np.mean(seconds):5.1f} ms a trial",
            flush=True,
        )


def real_sampler(name: str, plan: SearchPlan, profile: Profile, seed: int) -> optuna.samplers.BaseSampler:
    """Return the sampler as `autoprec search` makes it; scaler and optimizer stay at their defaults, as measured."""
    fixed = {**plan.parameters.defaults, **plan.parameters.fixed}
    if not name.startswith("policy"):
        return build_sampler(name, seed=seed, fixed=fixed)
    gap = plan.settings.limits.max_loss_gap
    lessons = learn_from_profile(profile, plan.parameters, plan.unit_calls, max_loss_gap=gap)
    prior = lessons.prior if name == "policy" else plain_prior(plan.parameters, plan.unit_calls)
    return build_sampler("policy", seed=seed, fixed=fixed, prior=prior, preference=PREFERENCE, reciprocal=[1])


def share_found(seen: Sequence[Outcome], every: Sequence[Outcome], reference: Outcome) -> float:
    volumes = [hypervolume([point(outcome, reference) for outcome in outcomes]) for outcomes in (seen, every)]
    return volumes[0] / volumes[1]


def worst_of(outcomes: Sequence[Outcome], name: str) -> Number:
    take = min if name == THROUGHPUT else max
    return take((getattr(outcome, name) for outcome in outcomes), key=lambda number: number.value)


def point(outcome: Outcome, reference: Outcome) -> tuple[float, float, float]:
    """Return memory saved and throughput gained, as shares of the reference's, and accuracy above a guess."""
    memory = 1.0 - outcome.peak_memory_bytes.value / reference.peak_memory_bytes.value
    speed = outcome.throughput_samples_per_second.value / reference.throughput_samples_per_second.value - 1.0
    return max(memory, 0.0), max(speed, 0.0), max(outcome.accuracy.value - GUESS, 0.0)


def is_feasible(outcome: Outcome, fp32: Outcome) -> bool:
    return all(value <= 0 for value in constraint_values(outcome, fp32, Limits()).values())


def hypervolume(points: Sequence[tuple[float, float, float]]) -> float:
    """Return the volume that the points dominate above the origin, all three to be maximized."""
    levels = sorted({p[2] for p in points}, reverse=True)
    volume = 0.0
    for level, below in zip(levels, [*levels[1:], 0.0], strict=True):
        area, reached = 0.0, 0.0
        for x, y, _ in sorted((p for p in points if p[2] >= level), reverse=True):
            if y > reached:
                area += x * (y - reached)
                reached = y
        volume += area * (level - below)
    return volume


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["synthetic", "real", "all"], nargs="?", default="all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--stock-trials", type=int, default=60)
    parser.add_argument("--real-trials", type=int, default=20)
    parser.add_argument("--gp-seeds", type=int, default=1)
    parser.add_argument("--samplers", default=";".join(SAMPLERS))
    parser.add_argument(
        "--problems", default=",".join(make.__name__ for make in (*chains.FRIENDLY, *chains.UNFRIENDLY))
    )
    arguments = parser.parse_args()
    quiet_optuna()
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    names = arguments.samplers.split(";")
    kinds = [getattr(chains, name) for name in arguments.problems.split(",")]
    if arguments.what in ("synthetic", "all"):
        synthetic(names, arguments, kinds)
    if arguments.what in ("real", "all"):
        real(names, arguments)


if __name__ == "__main__":
    main()

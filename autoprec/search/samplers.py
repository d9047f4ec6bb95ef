"""Samplers by name, reseeded for each trial so that a resumed study never repeats its samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autoprec.errors import UsageError, did_you_mean
from autoprec.search.policy_sampler import PolicySampler
from autoprec.search.prior import PolicyPrior

__all__ = ["POLICY", "SAMPLERS", "build_sampler", "ReseededSampler"]

POLICY = "policy"
"""The sampler for precision policies, autoprec's own; the others are Optuna's."""

NUM_STARTUP_TRIALS = 10

STOCK: Mapping[str, Callable[[int], BaseSampler]] = {
    "tpe": lambda seed: TPESampler(seed=seed, n_startup_trials=NUM_STARTUP_TRIALS),
    "nsga2": lambda seed: NSGAIISampler(seed=seed, population_size=16),
    "gp": lambda seed: GPSampler(seed=seed, n_startup_trials=NUM_STARTUP_TRIALS),
    "random": lambda seed: RandomSampler(seed=seed),
}
SAMPLERS = (POLICY, *STOCK)


def build_sampler(
    name: str,
    *,
    seed: int,
    fixed: Mapping[str, Any] | None = None,
    prior: PolicyPrior | None = None,
    preference: Sequence[float] | None = None,
    reciprocal: Sequence[int] = (),
    same: Sequence[str] = (),
    scaler: Sequence[str] = (),
    late: Sequence[str] = (),
    families: Mapping[str, Mapping[str, PolicyPrior]] | None = None,
) -> BaseSampler:
    """Return the sampler called `name`; parameters in `fixed` are never sampled, only enqueued trials differ.

    What comes after `prior` is for the policy sampler; the prior's pinned parameters hold for all.

    Raises:
        UsageError: no such sampler.
    """
    if name not in SAMPLERS:
        raise UsageError(f"sampler {name!r}; allowed: {', '.join(SAMPLERS)}{did_you_mean(name, SAMPLERS)}")
    if name == POLICY:
        return PolicySampler(
            seed=seed,
            prior=prior,
            preference=preference,
            reciprocal=reciprocal,
            fixed=fixed,
            same=same,
            scaler=scaler,
            late=late,
            families=families,
            ignore_failed=True,
        )
    held = {**(fixed or {}), **(prior.pinned if prior is not None else {})}
    return ReseededSampler(lambda trial_seed: _quietly(STOCK[name], trial_seed), seed=seed, fixed=held)


def _quietly(build: Callable[[int], BaseSampler], seed: int) -> BaseSampler:
    """Build a sampler without Optuna's notice that some of them are experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return build(seed)


class ReseededSampler(BaseSampler):
    """Build the inner sampler anew for each trial, seeded from (seed, number of the trial without failed ones).

    All else that a sampler knows is in the study's history, so that an interrupted study goes on as an unbroken one.
    Parameters in `fixed` always get their value there.
    """

    def __init__(
        self, build: Callable[[int], BaseSampler], *, seed: int, fixed: Mapping[str, Any] | None = None
    ) -> None:
        self._build = build
        self._seed = seed
        self._fixed = dict(fixed or {})
        self._inner = build(seed)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        failed = study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
        index = trial.number - sum(other.number < trial.number for other in failed)
        trial_seed = int(np.random.SeedSequence([self._seed, index]).generate_state(1)[0])
        self._inner = self._build(trial_seed)
        self._inner.before_trial(study, trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        space = self._inner.infer_relative_search_space(study, trial)
        return {name: distribution for name, distribution in space.items() if name not in self._fixed}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._inner.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        if param_name in self._fixed:
            return self._fixed[param_name]
        return self._inner.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        self._inner.after_trial(study, trial, state, values)

    def reseed_rng(self) -> None:
        self._inner.reseed_rng()


def quiet_optuna() -> None:
    """Let Optuna log warnings only; progress is this tool's own."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)

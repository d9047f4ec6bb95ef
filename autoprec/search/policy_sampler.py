"""`PolicySampler`: an Optuna sampler for studies whose parameters are the precisions of a model's units.

    study = optuna.create_study(directions=["minimize", "maximize"], sampler=PolicySampler(seed=0, reciprocal=[1]))
    study.optimize(objective, n_trials=30)

where `objective` suggests `trial.suggest_categorical("precision/layer1", ["fp32", "autocast", "fp16"])` for each unit,
in call order, and returns, say, memory and throughput. A training that fails is told by
`trial.set_constraint("finite", 1.0)`, the first unit that was not finite by
`trial.set_user_attr("failed_unit", "precision/layer1")`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.search_space import IntersectionSearchSpace
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from autoprec.search.prior import PolicyPrior
from autoprec.search.proposals import best_so_far, propose
from autoprec.search.trial_history import encode_decisions, read_history

__all__ = ["PolicySampler", "SAFE_CHOICE"]

SAFE_CHOICE = "fp32"
LATE_AFTER, LATE_EVERY = 20, 4


class PolicySampler(BaseSampler):
    """Propose policies from an additive cost model, solved exactly over the units in call order.

    Decisions are the categorical parameters that offer `safe_choice`. Each objective and each constraint is modelled as
    a sum of costs of units and of the borders between units of different precision; trials correct it, and dynamic
    programming finds the policies worth a trial. All state is the study's: a resumed study, and several workers on
    one, go on as one. Other parameters, and decisions as long as the model predicts nothing, are sampled by TPE.

    The first policy of an empty study is the safe choice everywhere: all else is measured against it.

    Args:
        seed: with the trial's number (interrupted ones left out) it decides every draw; None draws one.
        prior: what a profile says of the units; None starts from nothing.
        preference: weight of each objective in relative terms (1 % of one against 1 % of the other); None weighs all
            the same. Every fourth proposal looks elsewhere on the front.
        reciprocal: numbers of the objectives, such as a throughput, that add up over units as 1 / value.
        fixed: parameters that get this value whatever happens.
        same: names in `fixed` that change what a trial gives: one with another value teaches nothing about precisions.
        scaler: names in `fixed` that change what constraints say and not what a policy costs: where a trial has other
            values, its constraints teach nothing, and a policy that broke one may be proposed again.
        late: names in `fixed`, as `same`, that are searched after the precisions: from the trial number `LATE_AFTER` on
            every `LATE_EVERY`th trial gives the best policy so far another value of one of them.
        families: the parameter that says of which family a policy is -> its values, each with the prior of that family.
            Proposals take turns; objectives are learned from all trials, constraints and failures from those of the
            family. None: there is one family.
        safe_choice: the choice that never makes a training fail.
        ignore_failed: trials in state FAIL say nothing about their policy (they were interrupted); False takes a failed
            trial for a failed training.
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        prior: PolicyPrior | None = None,
        preference: Sequence[float] | None = None,
        reciprocal: Sequence[int] = (),
        fixed: Mapping[str, Any] | None = None,
        same: Sequence[str] = (),
        scaler: Sequence[str] = (),
        late: Sequence[str] = (),
        families: Mapping[str, Mapping[str, PolicyPrior]] | None = None,
        safe_choice: str = SAFE_CHOICE,
        ignore_failed: bool = False,
    ) -> None:
        self._seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        self._prior = prior or PolicyPrior()
        self._preference = None if preference is None else tuple(preference)
        self._reciprocal = tuple(reciprocal)
        self._fixed = dict(fixed or {})
        self._same = {name: self._fixed[name] for name in (*same, *late) if name in self._fixed}
        self._scaler = {name: self._fixed[name] for name in scaler if name in self._fixed}
        self._searched_late = tuple(name for name in late if name in self._fixed)
        self._families = [
            (name, value, prior) for name, own in (families or {}).items() for value, prior in own.items()
        ]
        self._safe_choice = safe_choice
        self._ignore_failed = ignore_failed
        self._last_place: tuple[Study, int, int] | None = None
        self._common = IntersectionSearchSpace(include_pruned=True)

    def reseed_rng(self) -> None:
        """Do nothing: draws depend on the seed and the trial's number, so that workers never repeat each other's."""

    def suggest(self, study: Study, distributions: Mapping[str, BaseDistribution]) -> dict[str, Any]:
        """Return a value for every parameter, as `study.ask(distributions)` does for the trial that it creates.

        For a trial that is not created yet: nobody else may create one meanwhile.
        """
        trial = create_trial(state=TrialState.RUNNING)
        trial.number = len(study.get_trials(deepcopy=False))
        space = self.infer_relative_search_space(study, trial)
        relative = self.sample_relative(study, trial, space)
        values = {}
        for name, distribution in distributions.items():
            if isinstance(distribution, CategoricalDistribution) and distribution.single():
                values[name] = distribution.choices[0]
            elif name in relative and space[name] == distribution:
                values[name] = relative[name]
            else:
                values[name] = self.sample_independent(study, trial, name, distribution)
        return values

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return what all finished trials had in common, single choices and fixed parameters left out."""
        space = self._common.calculate(study)
        return {n: d for n, d in space.items() if not d.single() and n not in self._fixed}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return a value for every parameter of `search_space`."""
        proposed = self._propose(study, trial, search_space)
        return {
            name: proposed[name] if name in proposed else self.sample_independent(study, trial, name, distribution)
            for name, distribution in search_space.items()
        }

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Return the fixed or pinned value, the safe choice in an empty study, else TPE's suggestion."""
        if param_name == self._late(study, trial):
            return self._other_value(study, trial, param_name, param_distribution)
        if param_name in self._fixed:
            return self._fixed[param_name]
        if param_name in self._prior.pinned:
            return self._prior.pinned[param_name]
        if isinstance(param_distribution, CategoricalDistribution):
            is_first = not any(t.state.is_finished() for t in study.get_trials(deepcopy=False))
            if is_first and self._safe_choice in param_distribution.choices:
                return self._safe_choice
        number = zlib.crc32(param_name.encode())
        place = [self._seed, self._place(study, trial), number]
        fallback = TPESampler(seed=int(np.random.SeedSequence(place).generate_state(1)[0]))
        return fallback.sample_independent(study, trial, param_name, param_distribution)

    def _propose(self, study: Study, trial: FrozenTrial, space: Mapping[str, BaseDistribution]) -> Mapping[str, Any]:
        place = self._place(study, trial)
        number, prior, family = place, self._prior, None
        if self._families:
            number, turn = divmod(place, len(self._families))
            name, value, prior = self._families[turn]
            family = (name, value)
        chosen = self._propose_in(study, trial, space, prior, family, number=number, place=place)
        return chosen if family is None else {**chosen, family[0]: family[1]}

    def _propose_in(
        self,
        study: Study,
        trial: FrozenTrial,
        space: Mapping[str, BaseDistribution],
        prior: PolicyPrior,
        family: tuple[str, str] | None,
        *,
        number: int,
        place: int,
    ) -> Mapping[str, Any]:
        trials = [t for t in study.get_trials(deepcopy=False) if t.number != trial.number]
        encoding = encode_decisions(space, trials, prior, safe_choice=self._safe_choice)
        if not encoding.parameters:
            return {}
        history = read_history(
            encoding,
            trials,
            study.directions,
            reciprocal=self._reciprocal,
            ignore_failed=self._ignore_failed,
            same=self._same,
            scaler=self._scaler,
            family=family,
        )
        weights = (
            np.ones(len(study.directions)) if self._preference is None else np.array(self._preference, dtype=float)
        )
        if len(weights) != len(study.directions) or (weights < 0).any() or not weights.any():
            raise ValueError(
                f"preference is {self._preference}; {len(study.directions)} weights from 0, not all 0, are needed"
            )
        rng = np.random.default_rng([self._seed, place])
        if self._late(study, trial) is not None and history.feasible.any():
            return encoding.values(best_so_far(history, weights))
        chosen = propose(encoding, history, prior, weights=weights, number=number, rng=rng)
        return {} if chosen is None else encoding.values(chosen)

    def _place(self, study: Study, trial: FrozenTrial) -> int:
        """Return the trial's number, those left out that were interrupted: what is drawn is as in an unbroken study."""
        if not self._ignore_failed:
            return trial.number
        if self._last_place is None or self._last_place[:2] != (study, trial.number):
            failed = study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
            place = trial.number - sum(other.number < trial.number for other in failed)
            self._last_place = (study, trial.number, place)
        return self._last_place[2]

    def _late(self, study: Study, trial: FrozenTrial) -> str | None:
        """Return the late parameter that this trial is about; None where it is about precisions."""
        turn, rest = divmod(self._place(study, trial) - LATE_AFTER, LATE_EVERY)
        names = self._searched_late
        return names[turn % len(names)] if names and turn >= 0 and rest == 0 else None

    def _other_value(self, study: Study, trial: FrozenTrial, name: str, distribution: BaseDistribution) -> Any:
        """Return a value that is not the fixed one; the fixed one where there is no other or the range is no list."""
        choices = distribution.choices if isinstance(distribution, CategoricalDistribution) else ()
        others = [choice for choice in choices if choice != self._fixed[name]]
        rng = np.random.default_rng([self._seed, self._place(study, trial)])
        return others[int(rng.integers(len(others)))] if others else self._fixed[name]

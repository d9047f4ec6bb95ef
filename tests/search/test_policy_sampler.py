"""The policy sampler as an Optuna sampler: its contract, plain studies, failures, duplicates, resume, workers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.testing.pytest_samplers import (
    BasicSamplerTestCase,
    MultiObjectiveSamplerTestCase,
    RelativeSamplerTestCase,
)
from optuna.trial import FrozenTrial, Trial, TrialState

from autoprec.search.policy_sampler import PolicySampler
from autoprec.search.prior import CostPrior, PolicyPrior
from autoprec.search.proposals import NUM_DRAWS, RISK
from autoprec.search.solver import Solver

CHOICES = ("fp32", "autocast", "fp16")


class Toy:
    """Units with additive costs, a cast at each border, and units that overflow in half; memory follows time."""

    def __init__(self, num_units: int = 8, *, bad: frozenset[int] = frozenset(), cast: float = 0.1) -> None:
        rng = np.random.default_rng(num_units)
        self.names = [f"precision/u{i}" for i in range(num_units)]
        self.saved = rng.uniform(0.1, 0.9, num_units)
        self.bad, self.cast = bad, cast

    @property
    def distributions(self) -> dict[str, CategoricalDistribution]:
        return {name: CategoricalDistribution(CHOICES) for name in self.names}

    def time(self, params: dict[str, Any]) -> float:
        kinds = [params[name] for name in self.names]
        units = sum(
            1.0 - s * {"fp32": 0, "autocast": 0.5, "fp16": 1}[k] for s, k in zip(self.saved, kinds, strict=True)
        )
        return units + self.cast * sum(a != b for a, b in itertools.pairwise(kinds))

    def first_bad(self, params: dict[str, Any]) -> str | None:
        return next((n for i, n in enumerate(self.names) if i in self.bad and params[n] != "fp32"), None)

    def objective(self, trial: Trial) -> tuple[float, float]:
        params = {name: trial.suggest_categorical(name, CHOICES) for name in self.names}
        bad = self.first_bad(params)
        trial.set_constraint("finite", -1.0 if bad is None else 1.0)
        if bad is not None:
            trial.set_user_attr("failed_unit", bad)
            return 100.0, 0.0
        return self.time(params), 1.0 / self.time(params)

    def optimum(self) -> float:
        rows = itertools.product(CHOICES, repeat=len(self.names))
        every = (dict(zip(self.names, row, strict=True)) for row in rows)
        return min(self.time(params) for params in every if self.first_bad(params) is None)


def differing(trial: FrozenTrial, other: FrozenTrial) -> list[str]:
    return [name for name, value in trial.params.items() if other.params[name] != value]


def create(sampler: BaseSampler, **settings: Any) -> optuna.Study:
    return optuna.create_study(directions=["minimize", "maximize"], sampler=sampler, **settings)


def policy_sampler(seed: int = 0, **settings: Any) -> PolicySampler:
    return PolicySampler(seed=seed, reciprocal=[1], **settings)


class TestContract(BasicSamplerTestCase, RelativeSamplerTestCase, MultiObjectiveSamplerTestCase):
    """What Optuna asks of every sampler, by its own tests."""

    @pytest.fixture(params=["fp32", "a"], ids=["without decisions", "with decisions"])
    def sampler(self, request: pytest.FixtureRequest) -> Callable[[], BaseSampler]:
        return lambda: PolicySampler(seed=0, safe_choice=request.param)


def test_a_plain_study_starts_with_all_safe_and_comes_to_the_optimum() -> None:
    toy = Toy()
    study = create(policy_sampler())
    study.optimize(toy.objective, n_trials=20)
    assert set(study.trials[0].params.values()) == {"fp32"}
    assert min(trial.values[0] for trial in study.trials) == pytest.approx(toy.optimum())


def test_an_overflow_names_its_unit_and_the_next_proposal_keeps_just_that_one_safe() -> None:
    toy = Toy(bad=frozenset({2, 5}))
    study = create(policy_sampler())
    study.enqueue_trial(dict.fromkeys(toy.names, "fp32"))
    study.enqueue_trial(dict.fromkeys(toy.names, "fp16"))
    study.optimize(toy.objective, n_trials=4)
    repaired = study.trials[2].params
    assert [name for name in toy.names if repaired[name] == "fp32"] == ["precision/u2"]
    again = study.trials[3].params
    assert [name for name in toy.names if again[name] == "fp32"] == ["precision/u2", "precision/u5"]
    study.optimize(toy.objective, n_trials=16)
    feasible = [trial for trial in study.trials if trial.constraints["finite"] <= 0]
    assert min(trial.values[0] for trial in feasible) == pytest.approx(toy.optimum())


def test_failures_that_name_nothing_still_lead_to_the_unit_that_must_stay_safe() -> None:
    toy = Toy(bad=frozenset({3}))

    def prune(trial: Trial) -> tuple[float, float]:
        params = {name: trial.suggest_categorical(name, CHOICES) for name in toy.names}
        if toy.first_bad(params) is not None:
            raise optuna.TrialPruned
        return toy.time(params), 1.0 / toy.time(params)

    study = create(policy_sampler())
    study.optimize(prune, n_trials=30)
    done = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    assert min(trial.values[0] for trial in done) == pytest.approx(toy.optimum(), rel=0.03)


def test_a_result_that_is_not_finite_counts_as_a_failed_training() -> None:
    toy = Toy(bad=frozenset({0}))

    def objective(trial: Trial) -> tuple[float, float]:
        params = {name: trial.suggest_categorical(name, CHOICES) for name in toy.names}
        return (math.inf, 0.0) if toy.first_bad(params) else (toy.time(params), 1.0 / toy.time(params))

    study = create(policy_sampler())
    study.optimize(objective, n_trials=20)
    assert min(trial.values[0] for trial in study.trials) == pytest.approx(toy.optimum(), rel=0.03)


def test_no_policy_is_asked_for_twice() -> None:
    toy = Toy(3)
    study = create(policy_sampler())
    study.optimize(toy.objective, n_trials=27)
    assert len({tuple(trial.params.items()) for trial in study.trials}) == 27


def test_a_duplicate_teaches_that_two_choices_are_one() -> None:
    toy = Toy(3)
    study = create(policy_sampler())
    asked = []
    for _ in range(16):
        trial = study.ask(fixed_distributions=toy.distributions)
        effective = {n: "fp16" if n == "precision/u0" and v == "autocast" else v for n, v in trial.params.items()}
        if effective in asked:
            trial.set_user_attr("cached_from", asked.index(effective))
        asked.append(effective if effective not in asked else None)
        study.tell(trial, [toy.time(effective), 1.0 / toy.time(effective)])
    duplicates = [trial for trial in study.trials if "cached_from" in trial.user_attrs]
    lessons = [t for t in duplicates if differing(t, study.trials[t.user_attrs["cached_from"]]) == ["precision/u0"]]
    assert lessons
    later = study.trials[lessons[0].number + 1 :]
    assert len(later) > 3
    assert len({trial.params["precision/u0"] for trial in later} & {"autocast", "fp16"}) == 1


def test_a_resumed_study_asks_for_what_an_unbroken_one_would() -> None:
    toy = Toy(bad=frozenset({4}))
    whole = create(policy_sampler())
    whole.optimize(toy.objective, n_trials=12)
    storage = optuna.storages.InMemoryStorage()
    create(policy_sampler(), storage=storage, study_name="s").optimize(toy.objective, n_trials=5)
    resumed = optuna.load_study(study_name="s", storage=storage, sampler=policy_sampler())
    resumed.optimize(toy.objective, n_trials=7)
    assert [trial.params for trial in resumed.trials] == [trial.params for trial in whole.trials]


def test_workers_on_one_study_do_not_ask_for_what_another_is_running() -> None:
    toy = Toy()
    storage = optuna.storages.InMemoryStorage()
    first = create(policy_sampler(seed=0), storage=storage, study_name="s")
    first.optimize(toy.objective, n_trials=3)
    second = optuna.load_study(study_name="s", storage=storage, sampler=policy_sampler(seed=0))
    running = [study.ask(fixed_distributions=toy.distributions) for study in (first, second, first, second)]
    assert len({tuple(trial.params.items()) for trial in running}) == 4


def test_a_profile_spares_the_units_that_it_says_overflow() -> None:
    toy = Toy(bad=frozenset({1, 6}))
    half = {"autocast": 0.5, "fp16": 1.0}
    changes = {(n, c): -s * half[c] / 8 for n, s in zip(toy.names, toy.saved, strict=True) for c in half}
    prior = PolicyPrior(
        order=tuple(toy.names),
        costs={k: CostPrior(units=changes) for k in (0, 1)},
        failures={(toy.names[i], c): 0.9 for i in toy.bad for c in ("autocast", "fp16")},
    )
    study = create(policy_sampler(prior=prior))
    study.optimize(toy.objective, n_trials=2)
    assert study.trials[1].constraints["finite"] <= 0
    assert study.trials[1].values[0] == pytest.approx(toy.optimum(), rel=0.05)


def test_fixed_parameters_keep_their_value_and_others_are_sampled() -> None:
    toy = Toy(3)
    study = create(policy_sampler(fixed={"grad_scaler/init_scale": 65536.0}))
    distributions = {
        **toy.distributions,
        "grad_scaler/init_scale": CategoricalDistribution((1024.0, 65536.0)),
        "lr": optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True),
    }
    for _ in range(8):
        trial = study.ask(fixed_distributions=distributions)
        study.tell(trial, [toy.time(trial.params), 1.0 / toy.time(trial.params)])
    assert {trial.params["grad_scaler/init_scale"] for trial in study.trials} == {65536.0}
    assert len({trial.params["lr"] for trial in study.trials}) == 8


def test_late_parameters_are_tried_on_the_best_policy_after_the_precisions() -> None:
    toy = Toy(4)
    distributions = {**toy.distributions, "optimizer/eps": CategoricalDistribution((1e-8, 1e-7))}
    study = create(policy_sampler(fixed={"optimizer/eps": 1e-8}, late=["optimizer/eps"]))
    for _ in range(25):
        trial = study.ask(fixed_distributions=distributions)
        late = 100.0 * (trial.params["optimizer/eps"] != 1e-8)  # must not be taken for the policy's cost
        study.tell(trial, [toy.time(trial.params) + late, 1.0 / toy.time(trial.params)])
    changed = [trial for trial in study.trials if trial.params["optimizer/eps"] != 1e-8]
    assert [trial.number for trial in changed] == [20, 24]
    best = min(study.trials[:20], key=lambda trial: trial.values[0])
    assert differing(changed[0], best) == ["optimizer/eps"]
    assert changed[0].values[0] == pytest.approx(toy.optimum() + 100.0)


def test_a_study_with_one_objective_works_too() -> None:
    toy = Toy()
    study = optuna.create_study(sampler=PolicySampler(seed=1))
    study.optimize(lambda trial: toy.objective(trial)[0], n_trials=20)
    assert study.best_value == pytest.approx(toy.optimum())


def test_a_preference_that_does_not_match_the_objectives_is_refused() -> None:
    study = create(PolicySampler(seed=0, preference=[1.0]))
    toy = Toy(3)
    study.optimize(toy.objective, n_trials=1)
    with pytest.raises(ValueError, match="2 weights from 0"):
        study.optimize(toy.objective, n_trials=1)


def test_a_suggestion_over_54_units_solves_8_weightings_once_however_many_trials_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy = Toy(54, bad=frozenset({10, 30}))
    study = create(policy_sampler())
    study.optimize(toy.objective, n_trials=10)
    work: list[tuple[int, int]] = []
    solve = Solver.solve

    def counted(solver: Solver, units: Any, borders: Any) -> Any:
        work.append((len(units[0]), solver.num_states))
        return solve(solver, units, borders)

    monkeypatch.setattr(Solver, "solve", counted)
    study.optimize(toy.objective, n_trials=20)
    assert work == [(len(RISK) * (1 + NUM_DRAWS), 53 * 9 + 3)] * 20


def test_a_pruned_trial_teaches_its_constraints_and_that_it_did_not_fail() -> None:
    toy = Toy(6)

    def objective(trial: Trial) -> tuple[float, float]:
        params = {name: trial.suggest_categorical(name, CHOICES) for name in toy.names}
        gap = sum(0.4 for name in toy.names[:3] if params[name] != "fp32") - 0.5
        trial.set_constraint("finite", -1.0)
        trial.set_constraint("loss_gap", gap)
        if gap > 0:
            raise optuna.TrialPruned
        return toy.time(params), 1.0 / toy.time(params)

    study = create(policy_sampler())
    study.enqueue_trial(dict.fromkeys(toy.names, "fp32"))
    study.enqueue_trial(dict.fromkeys(toy.names, "fp16"))
    study.optimize(objective, n_trials=20)
    assert study.trials[1].state == TrialState.PRUNED
    pruned = [trial for trial in study.trials[2:] if trial.state == TrialState.PRUNED]
    assert len(pruned) <= 6  # of the 27 patterns of the first three units 7 keep the limit


def test_a_policy_that_broke_a_constraint_under_another_scaler_is_tried_under_its_own() -> None:
    toy, name = Toy(4, cast=0.0), "grad_scaler/init_scale"
    space = {**toy.distributions, name: CategoricalDistribution([512.0, 65536.0])}
    study = create(policy_sampler(fixed={name: 512.0}, scaler=[name]))
    for kind, scale in (("fp32", 65536.0), ("fp16", 65536.0)):
        study.enqueue_trial({**dict.fromkeys(toy.names, kind), name: scale})
    for _ in range(3):
        trial = study.ask(fixed_distributions=space)
        is_low = any(trial.params[unit] != "fp32" for unit in toy.names)
        trial.set_constraint("finite", -1.0)
        trial.set_constraint("skip_rate", 0.5 if is_low and trial.params[name] > 512.0 else -0.25)
        study.tell(trial, [toy.time(trial.params), 1.0 / toy.time(trial.params)])
    assert study.trials[1].constraints["skip_rate"] > 0
    assert study.trials[2].params == {**dict.fromkeys(toy.names, "fp16"), name: 512.0}

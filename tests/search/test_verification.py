"""The proof: which runs are made, on which seeds, and what they prove."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import optuna
import pytest
from scipy.special import stdtrit
from toys import FakeMeasure

from autoprec.policy import Number, Policy
from autoprec.search.arms import BASELINES
from autoprec.search.events import Events
from autoprec.search.judging import Contender, judge
from autoprec.search.lookahead import Measure
from autoprec.search.metric import Metric
from autoprec.search.proof import FIRST_SEED, Proof, build_proof
from autoprec.search.scoring import OBJECTIVES
from autoprec.search.sensitivity import Gain, Sensitivity
from autoprec.search.shares import Shares
from autoprec.search.statistics import Interval
from autoprec.search.verification import PERTURBATION, RunStore, Verification, verify
from autoprec.trials.outcome import Headroom, Outcome, TrialSettings

FOUND = Policy(default="autocast", modules={"norm": "fp16"})
CONTENDERS = [
    Contender("fp32", BASELINES["fp32"], "a"),
    Contender("autocast fp16", BASELINES["autocast fp16"], "b"),
    Contender("trial 7", FOUND, "c"),
]
PROOF = Proof(margin=0.02, looks=(3, 6), num_steps=60)


def open_store(path: Path) -> RunStore:
    path.mkdir(exist_ok=True)
    study = optuna.create_study(
        study_name="proof",
        storage=f"sqlite:///{path / 'study.db'}",
        directions=list(OBJECTIVES.values()),
        load_if_exists=True,
    )
    return RunStore(study)


ORDER = ["trial 7", "autocast fp16", "fp32"]


def prove(
    path: Path,
    measure: Measure,
    contenders: list[Contender] = CONTENDERS,
    order: list[str] = ORDER,
    is_timed: bool = False,
    proof: Proof = PROOF,
) -> Verification:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    store = open_store(path)
    return verify(
        contenders,
        measure,
        proof=proof,
        trial_settings=TrialSettings(seed=5),
        is_timed=is_timed,
        store=store,
        shares=Shares(proof, store.study),
        order=[name for name in order if name in [c.name for c in contenders]],
        metric=Metric(),
        events=Events(),
    )


def test_quiet_arms_are_proved_at_the_first_look_on_seeds_that_no_trial_used(tmp_path: Path) -> None:
    measure = FakeMeasure(noise=0.001)
    found = prove(tmp_path, measure)
    assert {name: v.kind for name, v in found.verdicts.items()} == {
        "fp32": "reference",
        "autocast fp16": "proved",
        "trial 7": "proved",
    }
    assert sorted({seed for _, seed in measure.order}) == [5 + FIRST_SEED + i for i in range(3)]
    assert len(measure.order) == 9
    assert all(":True:" in call for call in measure.calls)  # the learning rate is annealed


def test_an_arm_that_is_worse_than_the_margin_is_refuted(tmp_path: Path) -> None:
    found = prove(tmp_path, FakeMeasure(noise=0.001, effect=lambda p: -0.05 if p == FOUND else 0.0))
    assert found.verdicts["trial 7"].kind == "refuted"
    assert found.verdicts["autocast fp16"].kind == "proved"
    assert found.verdicts["trial 7"].difference is not None
    assert found.verdicts["trial 7"].difference.mean == pytest.approx(-0.05, abs=0.005)


def test_noise_above_the_margin_leaves_the_verdict_open_after_the_last_seed_and_the_margin_as_it_was(
    tmp_path: Path,
) -> None:
    measure = FakeMeasure(noise=0.2)
    found = prove(tmp_path, measure)
    assert found.verdicts["autocast fp16"].kind == "open"
    assert found.proof.margin == 0.02
    assert len(measure.order) == 3 * 6 + 3  # and FP32 against itself, once
    assert found.provable_margin is not None
    assert found.provable_margin > 0.02


def test_fp32_against_itself_measures_the_noise_and_says_how_many_seeds_it_needs(tmp_path: Path) -> None:
    seen: list[float] = []

    def measure(policy: Policy, settings: TrialSettings) -> Outcome:
        seen.append(settings.perturbation)
        return FakeMeasure(noise=0.2)(policy, settings)

    found = prove(tmp_path, measure)
    assert seen.count(PERTURBATION) == 3
    assert seen.count(0.0) == 18
    values = [found.outcomes["fp32"][i].accuracy for i in range(3)]
    again = [o for (_, key, _), o in sorted(open_store(tmp_path).outcomes().items()) if key.endswith("perturbed")]
    differences = [b.accuracy.value - a.value for a, b in zip(values, again, strict=True)]  # type: ignore[union-attr]
    assert found.noise == pytest.approx(np.std(differences, ddof=1))
    needed = found.num_seeds_needed
    assert needed is not None
    half_widths = [stdtrit(n - 1, 1 - 0.025 * 0.8) * found.noise / n**0.5 for n in (needed - 1, needed)]
    assert half_widths[0] >= 0.02 > half_widths[1]


def test_where_nothing_is_left_open_fp32_is_not_run_against_itself(tmp_path: Path) -> None:
    found = prove(tmp_path, FakeMeasure(noise=0.001))
    assert found.noise is None


def test_a_held_out_loss_far_above_fp32s_refutes_though_the_accuracy_is_equal(tmp_path: Path) -> None:
    def measure(policy: Policy, settings: TrialSettings) -> Outcome:
        outcome = FakeMeasure(noise=0.001)(policy, settings)
        loss = Number(value=1.4 if policy == FOUND else 1.0, kind="emulated")
        return outcome.model_copy(update={"eval_loss": loss})

    verdict = prove(tmp_path, measure).verdicts["trial 7"]
    assert verdict.kind == "refuted"
    assert verdict.loss_excess is not None
    assert verdict.loss_excess.mean == pytest.approx(0.4)


def test_an_arm_that_comes_near_the_end_of_fp16_is_refuted_though_its_accuracy_is_equal(tmp_path: Path) -> None:
    def measure(policy: Policy, settings: TrialSettings) -> Outcome:
        assert settings.watch_headroom
        outcome = FakeMeasure(noise=0.001)(policy, settings)
        largest = 17_000.0 if policy == FOUND else 16_000.0
        found = Headroom(largest=largest, module="blocks.1.conv") if policy.low_precisions else None
        return outcome.model_copy(update={"headroom": found})

    verdicts = prove(tmp_path, measure).verdicts
    assert verdicts["trial 7"].kind == "refuted"
    assert "17,000 in module 'blocks.1.conv'" in verdicts["trial 7"].reason
    assert verdicts["autocast fp16"].kind == "proved"
    stored = [key for _, key, _ in open_store(tmp_path).outcomes()]
    assert (stored.count("a"), stored.count("b"), stored.count("c")) == (3, 3, 1)  # one look at it was enough


@pytest.mark.parametrize(
    ("max_seeds", "looks"), [(None, (4, 8)), (2, (2,)), (4, (4,)), (6, (4, 6)), (8, (4, 8)), (20, (4, 8, 16, 20))]
)
def test_looks_are_at_each_doubling_and_at_the_budget(max_seeds: int | None, looks: tuple[int, ...]) -> None:
    assert build_proof(max_seeds=max_seeds).looks == looks


@pytest.mark.parametrize("looks", [(4, 8), (4, 8, 16)])
def test_an_arm_that_is_worse_by_just_the_margin_is_proved_at_any_look_at_most_as_often_as_alpha_says(
    looks: tuple[int, ...],
) -> None:
    rng = np.random.default_rng(0)
    proof = Proof(margin=0.02, looks=looks)
    num_studies, num_proved = 2_000, 0
    for values in rng.normal(-0.02, 0.03, (num_studies, looks[-1])):
        known = {("x", i): accuracy(0.9 + float(value)) for i, value in enumerate(values)}
        known |= {("a", i): accuracy(0.9) for i in range(looks[-1])}
        arm, level = Contender("x", FOUND, "x"), proof.alpha_per_look
        verdicts = [judge(arm, CONTENDERS[0], known, n, proof, Metric(), LEARNED, level=level).kind for n in looks]
        num_proved += "proved" in verdicts
    share = num_proved / num_studies
    assert share <= 0.05 + 3 * (0.05 * 0.95 / num_studies) ** 0.5
    assert share >= 0.02  # the correction is not far too strict


def test_an_arm_behind_one_that_is_open_has_less_of_the_error_and_one_that_diverged_takes_none(tmp_path: Path) -> None:
    quiet, noisy = FakeMeasure(noise=0.001), FakeMeasure(noise=0.2)
    found = prove(tmp_path / "a", lambda policy, settings: (noisy if policy == FOUND else quiet)(policy, settings))
    assert found.verdicts["trial 7"].kind == "open"
    assert found.verdicts["autocast fp16"].difference is not None
    values = [
        found.outcomes["autocast fp16"][i].accuracy.value - found.outcomes["fp32"][i].accuracy.value  # type: ignore[union-attr]
        for i in range(3)
    ]
    error = float(np.std(values, ddof=1)) / 3**0.5
    assert found.verdicts["autocast fp16"].difference.half_width == pytest.approx(stdtrit(2, 1 - 0.025 * 0.16) * error)
    diverges = FakeMeasure(noise=0.001, fail=lambda p: "non_finite_loss" if p == FOUND else None)
    alone = prove(tmp_path / "b", diverges).verdicts["autocast fp16"].difference
    assert alone is not None
    assert alone.half_width == pytest.approx(stdtrit(2, 1 - 0.025 * 0.8) * error)


LEARNED = Sensitivity(40, Gain(Interval(8, 0.8, 0.01), 0.1, 0.02, True))


def accuracy(value: float) -> Outcome:
    return Outcome(kind="ok", accuracy=Number(value=value, kind="emulated"))


def test_only_open_arms_get_more_seeds(tmp_path: Path) -> None:
    quiet, noisy = FakeMeasure(), FakeMeasure(noise=0.2)
    found = prove(tmp_path, lambda policy, settings: (noisy if policy == FOUND else quiet)(policy, settings))
    assert found.verdicts["autocast fp16"].kind == "proved"
    assert len(found.outcomes["autocast fp16"]) == 3
    assert len(found.outcomes["trial 7"]) == 6
    assert len(found.outcomes["fp32"]) == 6


def test_an_open_arm_that_would_not_be_recommended_anyway_gets_no_more_seeds(tmp_path: Path) -> None:
    quiet, noisy = FakeMeasure(), FakeMeasure(noise=0.2)
    found = prove(
        tmp_path,
        lambda policy, settings: (noisy if policy == FOUND else quiet)(policy, settings),
        order=["autocast fp16", "trial 7", "fp32"],
    )
    assert found.verdicts["trial 7"].kind == "open"
    assert len(found.outcomes["trial 7"]) == 3
    assert len(found.outcomes["fp32"]) == 3


def test_an_arm_that_is_no_better_than_fp32_gets_no_more_seeds(tmp_path: Path) -> None:
    measure = FakeMeasure(noise=0.2)
    prove(tmp_path, measure, order=["fp32", "autocast fp16", "trial 7"])
    assert len(measure.order) == 9


def test_a_run_that_diverges_refutes_its_arm_and_is_not_tried_on_other_seeds(tmp_path: Path) -> None:
    measure = FakeMeasure(fail=lambda p: "non_finite_loss" if p == FOUND else None)
    found = prove(tmp_path, measure)
    assert found.verdicts["trial 7"].kind == "refuted"
    assert "non_finite_loss" in found.verdicts["trial 7"].reason
    assert len(found.outcomes["trial 7"]) == 1


def test_a_stopped_proof_makes_only_the_missing_runs(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        prove(tmp_path, FakeMeasure(noise=0.001, stop_at=5))
    rest = FakeMeasure(noise=0.001)
    found = prove(tmp_path, rest)
    assert len(rest.order) == 5
    assert found.verdicts == prove(tmp_path / "..", FakeMeasure(noise=0.001)).verdicts


def test_fp32_alone_needs_one_look(tmp_path: Path) -> None:
    measure = FakeMeasure()
    found = prove(tmp_path, measure, CONTENDERS[:1])
    assert found.verdicts["fp32"].is_safe
    assert found.provable_margin is None
    assert len(measure.order) == 3


def test_where_time_is_measured_the_arms_run_beside_fp32_in_another_order_on_each_seed(tmp_path: Path) -> None:
    measure = FakeMeasure(noise=0.001)
    prove(tmp_path, measure, is_timed=True)
    texts = {c.policy.to_json(): c.name for c in CONTENDERS}
    assert [texts[text] for text, _ in measure.order[:6]] == [
        "fp32",
        "autocast fp16",
        "trial 7",
        "fp32",
        "trial 7",
        "autocast fp16",
    ]


def test_another_finalist_is_compared_with_the_runs_of_fp32_that_are_there(tmp_path: Path) -> None:
    prove(tmp_path, FakeMeasure(noise=0.001), CONTENDERS[:2])
    more = FakeMeasure(noise=0.001)
    prove(tmp_path, more)
    assert {text for text, _ in more.order} == {FOUND.to_json()}

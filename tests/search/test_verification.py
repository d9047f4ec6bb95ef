"""The proof: which runs are made, on which seeds, and what they prove."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from toys import FakeMeasure

from autoprec.policy import Policy
from autoprec.search.arms import BASELINES
from autoprec.search.events import Events
from autoprec.search.lookahead import Measure
from autoprec.search.study import OBJECTIVES
from autoprec.search.verification import FIRST_SEED, Contender, Proof, RunStore, Verification, verify
from autoprec.trials.outcome import TrialSettings

FOUND = Policy(default="autocast", modules={"norm": "fp16"})
CONTENDERS = [
    Contender("fp32", BASELINES["fp32"], "a"),
    Contender("autocast fp16", BASELINES["autocast fp16"], "b"),
    Contender("trial 7", FOUND, "c"),
]
PROOF = Proof(margin=0.02, looks=(3, 6), num_steps=60)


def open_store(path: Path) -> RunStore:
    study = optuna.create_study(
        study_name="proof",
        storage=f"sqlite:///{path / 'study.db'}",
        directions=list(OBJECTIVES.values()),
        load_if_exists=True,
    )
    return RunStore(study)


GAINS = {"fp32": 0.0, "autocast fp16": 2.0, "trial 7": 2.5}


def prove(
    path: Path, measure: Measure, contenders: list[Contender] = CONTENDERS, gains: dict[str, float] = GAINS
) -> Verification:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return verify(
        contenders,
        measure,
        proof=PROOF,
        trial_settings=TrialSettings(seed=5),
        store=open_store(path),
        gains={c.name: gains[c.name] for c in contenders},
        resolution=0.0,
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
    assert len(measure.order) == 18
    assert found.provable_margin is not None
    assert found.provable_margin > 0.02


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
        gains={"fp32": 0.0, "autocast fp16": 2.0, "trial 7": 2.02},
    )
    assert found.verdicts["trial 7"].kind == "open"
    assert len(found.outcomes["trial 7"]) == 3
    assert len(found.outcomes["fp32"]) == 3


def test_an_arm_that_is_no_better_than_fp32_gets_no_more_seeds(tmp_path: Path) -> None:
    measure = FakeMeasure(noise=0.2)
    prove(tmp_path, measure, gains={"fp32": 0.0, "autocast fp16": 0.005, "trial 7": -0.2})
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


def test_the_order_of_arms_turns_from_seed_to_seed_after_fp32(tmp_path: Path) -> None:
    measure = FakeMeasure(noise=0.001)
    prove(tmp_path, measure)
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

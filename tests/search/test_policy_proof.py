"""`verify_policy`: the proof of any policy, its runs kept and shared, and the evidence it gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toys import FakeMeasure, TinyNet, tiny_task

from autoprec import verify_policy
from autoprec.apply import apply_policy
from autoprec.errors import ApplyError, StudyError, UsageError
from autoprec.policy import Policy, load_policy
from autoprec.search.policy_proof import FIRST_SEED, PolicyProof

HAND_WRITTEN = Policy(default="autocast", modules={"norm": "fp16"}, dtype="fp16")


def prove(
    folder: Path, policy: Policy = HAND_WRITTEN, measure: FakeMeasure | None = None, **changes: Any
) -> PolicyProof:
    measure = measure or FakeMeasure(noise=0.001)
    return verify_policy(policy, tiny_task(), output=folder, measure=measure, **{"device": "cpu", **changes})


def test_fp32_the_policy_and_plain_autocast_run_in_turns_on_seeds_that_no_search_used(tmp_path: Path) -> None:
    measure = FakeMeasure(noise=0.001)
    proof = prove(tmp_path, measure=measure)
    assert proof.is_proved
    assert not proof.is_worse
    assert set(proof.arms) == {"fp32", "policy", "autocast fp16"}
    assert sorted({seed for _, seed in measure.order}) == [FIRST_SEED + i for i in range(4)]
    assert len(measure.order) == 3 * 4
    assert proof.arms["policy"].memory_ratio is not None
    assert proof.arms["policy"].memory_ratio.kind == "computed"
    assert proof.sentence.startswith("Proved: score not worse than FP32's by more than 0.0799 (difference ")


def test_a_policy_that_is_worse_by_twice_the_margin_is_refuted(tmp_path: Path) -> None:
    measure = FakeMeasure(noise=0.001, effect=lambda p: -0.1 if p == HAND_WRITTEN else 0.0)
    proof = prove(tmp_path, measure=measure)
    assert proof.is_worse
    assert proof.sentence.startswith("Worse: score worse than FP32's by more than 0.0")


def test_noise_above_the_margin_is_open_and_says_how_many_seeds_would_do(tmp_path: Path) -> None:
    proof = prove(tmp_path, measure=FakeMeasure(noise=0.3), margin=0.05)
    assert (proof.is_proved, proof.is_worse) == (False, False)
    assert proof.verification.noise is not None
    assert f"about {proof.verification.num_seeds_needed} seeds would do" in proof.sentence


def test_the_runs_are_kept_and_another_policy_shares_those_of_fp32(tmp_path: Path) -> None:
    prove(tmp_path)
    again = FakeMeasure(noise=0.001)
    assert prove(tmp_path, measure=again).is_proved
    assert again.order == []
    other = Policy(default="autocast", modules={"head": "fp32"})
    more = FakeMeasure(noise=0.001)
    prove(tmp_path, other, more)
    assert {text for text, _ in more.order} == {other.to_json()}


def test_a_stopped_proof_goes_on(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        prove(tmp_path, measure=FakeMeasure(noise=0.001, stop_at=6))
    rest = FakeMeasure(noise=0.001)
    prove(tmp_path, measure=rest)
    assert len(rest.order) == 12 - 5


def test_without_autocast_only_the_pair_runs_and_plain_autocast_is_not_run_twice(tmp_path: Path) -> None:
    assert set(prove(tmp_path / "a", with_autocast=False).arms) == {"fp32", "policy"}
    assert set(prove(tmp_path / "b", Policy(default="autocast")).arms) == {"fp32", "policy"}
    assert set(prove(tmp_path / "c", Policy(default="autocast", dtype="bf16", modules={"head": "fp32"})).arms) == {
        "fp32",
        "policy",
        "autocast bf16",
    }


def test_a_policy_that_does_not_fit_the_model_runs_nothing(tmp_path: Path) -> None:
    measure = FakeMeasure()
    with pytest.raises(ApplyError, match="nom"):
        prove(tmp_path / "out", Policy(modules={"nom": "fp32"}), measure)
    assert measure.order == []
    assert not (tmp_path / "out").exists()


def test_where_fp32_does_not_train_nothing_is_said_of_the_policy(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="FP32 does not train"):
        prove(tmp_path, measure=FakeMeasure(fail=lambda p: "non_finite_loss"))


def test_the_updated_policy_carries_this_proof_and_a_refuted_one_no_recommendation(tmp_path: Path) -> None:
    updated = prove(tmp_path / "a").updated_policy()
    updated.save(tmp_path / "policy.json")
    policy = load_policy(tmp_path / "policy.json")
    apply_policy(TinyNet(), policy)
    assert policy.evidence is not None
    assert policy.evidence.arm == "policy"
    assert policy.evidence.verification is not None
    assert policy.evidence.verification.verdicts["policy"] == "proved"
    assert policy.recommendation is not None
    assert policy.recommendation.provisional
    measure = FakeMeasure(noise=0.001, effect=lambda p: -0.2 if p.low_precisions else 0.0)
    assert prove(tmp_path / "b", measure=measure).updated_policy().recommendation is None


def test_a_recorded_policy_that_fell_behind_its_file_is_not_proved(tmp_path: Path) -> None:
    recorded = prove(tmp_path / "a").updated_policy()
    kept = prove(tmp_path / "a", recorded)
    assert kept.is_proved
    assert len(kept.gate.comparisons) == 3
    assert recorded.evidence is not None
    arms = dict(recorded.evidence.arms)
    memory = arms["policy"].peak_memory_bytes
    assert memory is not None
    smaller = memory.model_copy(update={"value": memory.value * 0.9})
    arms["policy"] = arms["policy"].model_copy(update={"peak_memory_bytes": smaller})
    promised = recorded.replace(evidence=recorded.evidence.model_copy(update={"arms": arms}))
    behind = prove(tmp_path / "a", promised)
    assert behind.verdict.kind == "proved"
    assert behind.is_worse
    assert "behind what the file promises: peak memory" in behind.sentence
    assert prove(tmp_path / "a", promised, tolerance=0.2).is_proved


def test_the_margin_is_that_of_the_file_and_part_of_what_is_proved(tmp_path: Path) -> None:
    recorded = prove(tmp_path / "a", margin=0.02).updated_policy()
    assert prove(tmp_path / "a", recorded).verification.proof.margin == 0.02
    with pytest.raises(UsageError, match="margin is -1"):
        prove(tmp_path / "b", margin=-1)

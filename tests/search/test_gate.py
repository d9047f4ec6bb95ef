"""The regression gate: only numbers of one kind, one task and one device are compared, and only what is worse fails."""

from __future__ import annotations

from typing import Any

import pytest

from autoprec.policy import ArmEvidence, Evidence, Kind, Number, Policy, Provenance, VerificationEvidence
from autoprec.search.gate import Gate, compare_with_promise


def arm(memory: float = 50.0, ratio: float = 2.0, accuracy: float = 0.9, **kinds: Any) -> ArmEvidence:
    return ArmEvidence(
        peak_memory_bytes=Number(value=memory, kind=kinds.get("memory_kind", "computed")),
        throughput_ratio=Number(value=ratio, kind="predicted"),
        accuracy=Number(value=accuracy, kind="emulated", low=accuracy - 0.01, high=accuracy + 0.01),
    )


PROMISE = Policy(
    evidence=Evidence(
        arm="trial 7",
        arms={"trial 7": arm()},
        verification=VerificationEvidence(num_seeds=4, num_steps=40, margin=0.05),
    ),
    provenance=Provenance(settings={"task.name": "tiny", "task.settings.size": 8}, device_name="H200"),
)
IDENTITY = {"task.name": "tiny", "task.settings.size": 8, "proof.margin": 0.05}


def compare(found: ArmEvidence, policy: Policy = PROMISE, **changes: Any) -> Gate:
    settings: dict[str, Any] = {"identity": IDENTITY, "target": "H200", "target_is_here": False, "num_steps": 40}
    return compare_with_promise(policy, found, **{**settings, "tolerance": 0.05, **changes})


def test_what_is_kept_holds() -> None:
    gate = compare(arm(memory=52.0, ratio=1.95, accuracy=0.85))
    assert gate.holds
    assert [c.what for c in gate.comparisons] == ["peak memory", "throughput over FP32", "accuracy"]


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (arm(memory=53.0), "peak memory"),
        (arm(ratio=1.89), "throughput over FP32"),
        (arm(accuracy=0.83), "accuracy"),
    ],
)
def test_what_fell_behind_by_more_than_the_tolerance_is_named(found: ArmEvidence, what: str) -> None:
    gate = compare(found)
    assert not gate.holds
    assert [c.what for c in gate.comparisons if c.behind] == [what]


def test_better_than_promised_is_never_behind() -> None:
    assert compare(arm(memory=10.0, ratio=9.0, accuracy=1.0)).holds


@pytest.mark.parametrize("kind", ["measured", "predicted"])
def test_numbers_of_different_kinds_are_not_compared_and_a_note_says_so(kind: Kind) -> None:
    gate = compare(arm(memory=500.0, memory_kind=kind))
    assert gate.holds
    assert f"peak memory: the file's is computed, this one {kind}: not compared" in gate.notes


def test_another_task_or_device_or_length_is_not_compared() -> None:
    worse = arm(memory=500.0, ratio=0.1, accuracy=0.1)
    other = compare(worse, identity={**IDENTITY, "task.settings.size": 16})
    assert other.comparisons == ()
    assert "task.settings.size was 8, now 16" in other.notes[0]
    assert "are of H200, these of A100" in compare(worse, target="A100", target_is_here=True).notes[0]
    longer = compare(arm(accuracy=0.1), num_steps=400)
    assert longer.holds
    assert "accuracy: the file's runs had another number of steps" in longer.notes


def test_a_policy_without_evidence_promises_nothing() -> None:
    gate = compare(arm(), Policy())
    assert gate.holds
    assert gate.notes == ("the file records no numbers of this policy: nothing to compare",)


def test_a_measured_ratio_is_behind_only_where_its_whole_interval_is() -> None:
    found = arm().model_copy(update={"throughput_ratio": Number(value=1.8, kind="predicted", low=1.6, high=2.0)})
    assert compare(found).holds

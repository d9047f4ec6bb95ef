"""front.json: what it holds, and choosing again from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toys import FakeMeasure, TinyNet, tiny_plan

from autoprec.apply import apply_policy
from autoprec.errors import PolicyError, UsageError
from autoprec.policy import Policy, load_policy
from autoprec.report.front import front_table
from autoprec.search.export import rechosen_policy
from autoprec.search.front import Front, read_front
from autoprec.search.pipeline import SearchResult, run_search
from autoprec.search.worth import PREFERENCES
from autoprec.trials.outcome import Outcome, TrialSettings


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    """A search of a task that counts 16 tokens in a sample."""
    measure = FakeMeasure(noise=0.001)

    def with_tokens(policy: Policy, settings: TrialSettings) -> Outcome:
        outcome = measure(policy, settings)
        samples = outcome.throughput_samples_per_second
        assert samples is not None
        tokens = samples.model_copy(update={"value": 16 * samples.value})
        return outcome.model_copy(update={"throughput_tokens_per_second": tokens})

    return run_search(tiny_plan(tmp_path_factory.mktemp("front"), n_trials=8), with_tokens)


@pytest.fixture(scope="module")
def front(searched: SearchResult) -> Front:
    return read_front(searched.folder / "front.json")


def test_every_arm_of_the_proof_has_its_verdict_and_its_numbers_with_kinds(front: Front) -> None:
    by_name = {member.name: member for member in front.front}
    assert {"fp32", "autocast fp16", "autocast bf16"} <= set(by_name)
    fp32, found = by_name["fp32"], by_name[front.recommended]
    assert fp32.proof is not None
    assert fp32.proof.verdict == "reference"
    assert found.proof is not None
    assert found.proof.verdict == "proved"
    assert found.proof.accuracy_difference is not None
    assert found.proof.accuracy_difference.num_seeds == 4
    assert found.numbers["accuracy"].low is not None
    memory = found.numbers["peak_memory_bytes"].value / fp32.numbers["peak_memory_bytes"].value
    assert found.ratios["peak_memory_bytes"].value == pytest.approx(memory)
    assert found.ratios["peak_memory_bytes"].kind == "computed"
    assert found.ratios["peak_memory_bytes"].low is None


def test_tokens_a_second_stand_beside_samples_in_the_file_and_in_its_table(front: Front) -> None:
    for member in front.front:
        samples, tokens = (member.numbers[f"throughput_{unit}_per_second"] for unit in ("samples", "tokens"))
        assert tokens.value == 16 * samples.value
        assert tokens.kind == samples.kind
    assert [column.header for column in front_table(front).columns].count("tokens") == 1


def test_there_is_a_pick_for_each_preference_and_each_is_proved(front: Front) -> None:
    assert set(front.picks) == set(PREFERENCES)
    verdicts = {member.name: member.proof.verdict for member in front.front if member.proof is not None}
    assert {verdicts[name] for name in front.picks.values()} <= {"proved", "reference"}


def test_choosing_again_from_the_file_says_what_the_search_said(searched: SearchResult, front: Front) -> None:
    assert front.choose(prefer="balanced") == searched.choice


def test_a_memory_budget_chooses_another_policy_and_runs_nothing(front: Front) -> None:
    memory = {m.name: m.numbers["peak_memory_bytes"].value for m in front.front if "peak_memory_bytes" in m.numbers}
    choice = front.choose(prefer="smallest", memory_budget_bytes=memory["fp32"] - 1)
    assert memory[choice.name] < memory["fp32"]
    assert front.choose(prefer="smallest", memory_budget_bytes=1.0).kind == "inconclusive"


def test_the_policy_of_another_choice_applies_and_its_units_say_what_they_now_are(searched: SearchResult) -> None:
    exported = load_policy(searched.folder / "policy.json")
    front = read_front(searched.folder / "front.json")
    choice = front.choose(prefer="balanced", memory_budget_bytes=1.0)
    policy = rechosen_policy(exported, choice)
    apply_policy(TinyNet(), policy)
    assert policy.evidence is not None
    assert policy.evidence.arm == "fp32"
    assert {unit.precision for unit in policy.evidence.units.values()} == {"fp32"}
    assert policy.recommendation is not None
    assert policy.recommendation.choice == "inconclusive"


def test_another_preference_is_the_same_study_and_needs_no_new_trial(searched: SearchResult) -> None:
    measure = FakeMeasure(noise=0.001)
    again = run_search(tiny_plan(searched.folder, n_trials=8, prefer="smallest", memory_budget_bytes=2e9), measure)
    assert measure.order == []
    assert again.plan.study_name == searched.plan.study_name
    assert again.choice.prefer == "smallest"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.pop("proof"), "proof: Field required"),
        (lambda data: data.update(schema_version=2), "schema_version"),
        (lambda data: data["front"][0].update(surprise=1), "surprise"),
        (lambda data: data.update(front=[]), "no member is called 'fp32'"),
    ],
    ids=["missing", "version", "unknown", "empty"],
)
def test_a_file_that_is_no_front_is_an_error_that_says_where(
    searched: SearchResult, tmp_path: Path, change: object, words: str
) -> None:
    data = json.loads((searched.folder / "front.json").read_text())
    change(data)  # type: ignore[operator]
    path = tmp_path / "front.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PolicyError, match=words):
        read_front(path)


def test_a_front_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"front\.json: cannot be read"):
        read_front(tmp_path / "front.json")

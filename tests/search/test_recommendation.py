"""What is recommended, given numbers and verdicts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.policy import Number, Policy
from autoprec.search.arms import BASELINES
from autoprec.search.judging import Verdict
from autoprec.search.proof import Proof
from autoprec.search.ratios import Ratios
from autoprec.search.recommendation import PREFERENCES, Candidate, Choice, Prefer, choose, gain, rank
from autoprec.search.statistics import Interval
from autoprec.search.verification import Verification
from autoprec.trials.outcome import Outcome

FOUND = Policy(default="autocast", modules={"norm": "fp16"})


def candidate(name: str, memory: float, throughput: float, *, measured: bool = True) -> Candidate:
    outcome = Outcome(
        kind="ok",
        peak_memory_bytes=Number(value=memory, kind="measured" if measured else "computed"),
        throughput_samples_per_second=Number(value=throughput, kind="measured" if measured else "predicted"),
    )
    return Candidate(name, BASELINES.get(name, FOUND), name, outcome)


FP32 = candidate("fp32", 10.0, 100.0)
FP16 = candidate("autocast fp16", 6.0, 200.0)
BF16 = candidate("autocast bf16", 6.0, 200.0)


def decide(
    candidates: list[Candidate],
    kinds: dict[str, str],
    prefer: Prefer = "balanced",
    here: bool = False,
    budget: float | None = None,
    half_width: float = 0.004,
) -> Choice:
    difference = Interval(6, -0.001, half_width)
    verdicts = {
        name: Verdict(kind, None if kind == "reference" else difference, "")  # type: ignore[arg-type]
        for name, kind in {"fp32": "reference", **kinds}.items()
    }
    verification = Verification(Proof(margin=0.02), verdicts, {"fp32": dict.fromkeys(range(6), FP32.outcome)})
    return choose(
        candidates, verification, prefer=prefer, target="A100", target_is_here=here, memory_budget_bytes=budget
    )


def test_a_proved_policy_that_saves_memory_is_recommended() -> None:
    found = candidate("trial 7", 5.4, 200.0)
    choice = decide([FP32, FP16, found], {"autocast fp16": "proved", "trial 7": "proved"})
    assert (choice.kind, choice.name, choice.policy) == ("policy", "trial 7", FOUND)
    assert "0.54x the memory and 2.00x the throughput of FP32 on A100" in choice.sentence


@pytest.mark.parametrize("memory", [5.99, 5.95])
def test_less_than_one_percent_is_no_reason_to_leave_plain_autocast(memory: float) -> None:
    found = candidate("trial 7", memory, 200.0)
    choice = decide([FP32, FP16, found], {"autocast fp16": "proved", "trial 7": "proved"})
    assert (choice.kind, choice.name) == ("autocast", "autocast fp16")


def test_bf16_needs_no_scaler_and_wins_a_tie() -> None:
    choice = decide([FP32, FP16, BF16], {"autocast fp16": "proved", "autocast bf16": "proved"})
    assert choice.name == "autocast bf16"


def test_an_open_policy_is_never_recommended_and_is_named() -> None:
    found = candidate("trial 7", 5.0, 220.0)
    choice = decide([FP32, FP16, found], {"autocast fp16": "proved", "trial 7": "open"})
    assert choice.name == "autocast fp16"
    assert "trial 7 would be better but is not proved" in choice.sentence


@pytest.mark.parametrize(
    ("half_width", "words"),
    [
        (0.03, "6 seeds of 40 steps cannot prove a margin of 0.02 (the smallest margin it could prove is 0.030)"),
        (
            0.004,
            "6 seeds of 40 steps leave open whether accuracy stays within 0.02 of FP32 (mean difference -0.0010); an "
            "equal one would have been proved",
        ),
    ],
    ids=["too few seeds", "not equal"],
)
def test_with_everything_low_open_the_answer_is_inconclusive_and_the_policy_is_fp32(
    half_width: float, words: str
) -> None:
    choice = decide([FP32, FP16], {"autocast fp16": "open"}, half_width=half_width)
    assert (choice.kind, choice.policy) == ("inconclusive", Policy(default="fp32"))
    assert words in choice.sentence


def test_refuted_policies_leave_fp32_which_needs_no_proof() -> None:
    choice = decide([FP32, FP16], {"autocast fp16": "refuted"})
    assert choice.kind == "fp32"
    assert choice.sentence.startswith("Stay with FP32: autocast FP16 lost accuracy")


def test_an_open_policy_that_is_no_better_does_not_stand_in_the_way_of_fp32() -> None:
    slow = candidate("autocast fp16", 10.0, 80.0)
    choice = decide([FP32, slow], {"autocast fp16": "open"})
    assert choice.kind == "fp32"
    assert "no lower precision saves" in choice.sentence


def test_without_the_target_the_recommendation_is_provisional_and_with_it_not() -> None:
    assert decide([FP32, FP16], {"autocast fp16": "proved"}).provisional
    assert "provisional: A100 was not there" in decide([FP32, FP16], {"autocast fp16": "proved"}).sentence
    there = decide([FP32, FP16], {"autocast fp16": "proved"}, here=True)
    assert not there.provisional
    assert "provisional" not in there.sentence


@pytest.mark.parametrize(("prefer", "expected"), [("fastest", "fast"), ("smallest", "small"), ("balanced", "even")])
def test_the_preference_decides(prefer: Prefer, expected: str) -> None:
    several = [candidate("fast", 9.0, 300.0), candidate("small", 4.0, 100.0), candidate("even", 4.5, 220.0)]
    assert rank([FP32, *several], FP32, prefer)[0].name == expected


def test_gain_is_the_product_of_both_ratios_when_balanced() -> None:
    assert gain(candidate("x", 5.0, 150.0), FP32, "balanced") == pytest.approx(150 / 100 * 10 / 5 - 1)


PREDICTED_FP32 = candidate("fp32", 10.0, 100.0, measured=False)


@pytest.mark.parametrize("prefer", PREFERENCES)
def test_a_predicted_throughput_alone_recommends_nothing(prefer: Prefer) -> None:
    faster = candidate("autocast fp16", 10.0, 300.0, measured=False)
    choice = decide([PREDICTED_FP32, faster], {"autocast fp16": "proved"}, prefer)
    assert choice.kind == "fp32"


@pytest.mark.parametrize("prefer", PREFERENCES)
def test_more_memory_is_not_preferred_for_a_predicted_throughput(prefer: Prefer) -> None:
    small, fast = candidate("small", 5.0, 150.0, measured=False), candidate("fast", 6.0, 290.0, measured=False)
    assert [c.name for c in rank([PREDICTED_FP32, fast, small], PREDICTED_FP32, prefer)] == ["small", "fast", "fp32"]


@pytest.mark.parametrize(("throughput", "expected"), [(75.0, "autocast fp16"), (30.0, "fp32")])
def test_a_predicted_slowdown_counts_only_beyond_the_error_of_the_prediction(throughput: float, expected: str) -> None:
    slower = candidate("autocast fp16", 8.0, throughput, measured=False)
    assert rank([PREDICTED_FP32, slower], PREDICTED_FP32, "balanced")[0].name == expected


def test_a_gain_that_lies_within_the_noise_of_measured_pairs_is_none() -> None:
    noisy = Number(value=1.1, kind="measured", low=0.98, high=1.25)
    sure = Number(value=1.1, kind="measured", low=1.06, high=1.14)
    arm = candidate("trial 7", 10.0, 110.0)
    assert gain(replace(arm, paired=Ratios(throughput=noisy)), FP32, "fastest") == pytest.approx(0.0)
    assert gain(replace(arm, paired=Ratios(throughput=sure)), FP32, "fastest") == pytest.approx(0.06)


def test_a_memory_budget_leaves_out_what_does_not_fit() -> None:
    fast, small = candidate("fast", 9.0, 400.0), candidate("small", 4.0, 110.0)
    proved = {"fast": "proved", "small": "proved"}
    assert decide([FP32, fast, small], proved, "fastest").name == "fast"
    assert decide([FP32, fast, small], proved, "fastest", budget=8.0).name == "small"


def test_where_nothing_proved_fits_the_budget_the_answer_is_inconclusive() -> None:
    choice = decide([FP32, FP16], {"autocast fp16": "proved"}, budget=1.0)
    assert choice.kind == "inconclusive"
    assert "no policy that is proved fits" in choice.sentence
    assert choice.policy == Policy(default="fp32")


def test_an_open_policy_beyond_the_budget_does_not_stand_in_the_way() -> None:
    big = candidate("trial 7", 9.0, 900.0)
    choice = decide([FP32, FP16, big], {"autocast fp16": "proved", "trial 7": "open"}, budget=8.0)
    assert choice.name == "autocast fp16"
    assert "trial 7" not in choice.sentence

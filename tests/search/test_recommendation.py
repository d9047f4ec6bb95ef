"""What is recommended, given numbers and verdicts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.policy import GradScalerSettings, Number, Policy
from autoprec.search.arms import AUTOCAST_BF16, BASELINES
from autoprec.search.judging import Verdict
from autoprec.search.metric import Metric
from autoprec.search.proof import Proof
from autoprec.search.ratios import Ratios
from autoprec.search.recommendation import Choice, choose
from autoprec.search.sensitivity import Gain, Sensitivity
from autoprec.search.statistics import Interval
from autoprec.search.verification import Verification
from autoprec.search.worth import PREFERENCES, Candidate, Prefer, Worth, best, in_order
from autoprec.trials.outcome import Outcome

FOUND = Policy(default="autocast", dtype="bf16", modules={"norm": "bf16"})
FOUND_FP16 = Policy(default="autocast", dtype="fp16", modules={"norm": "fp16"})
GIB = 2.0**30


def candidate(
    name: str, memory: float, throughput: float, *, measured: bool = True, policy: Policy = FOUND, skips: int = 0
) -> Candidate:
    """Return an arm; `memory` in GiB."""
    outcome = Outcome(
        kind="ok",
        peak_memory_bytes=Number(value=memory * GIB, kind="measured" if measured else "computed"),
        throughput_samples_per_second=Number(value=throughput, kind="measured" if measured else "predicted"),
        num_steps_taken=40 - skips,
        num_steps_skipped=skips,
    )
    return Candidate(name, BASELINES.get(name, policy), name, outcome)


FP32 = candidate("fp32", 10.0, 100.0)
FP16 = candidate("autocast fp16", 6.0, 200.0)
BF16 = candidate("autocast bf16", 6.0, 200.0)
A100 = Worth(capacity_bytes=80 * GIB, present=AUTOCAST_BF16)
LEARNED = Sensitivity(40, Gain(Interval(6, 0.7, 0.02), 0.1, 0.02, True))


def decide(
    candidates: list[Candidate],
    kinds: dict[str, str],
    prefer: Prefer = "balanced",
    here: bool = False,
    budget: float | None = None,
    half_width: float = 0.004,
    worth: Worth = A100,
    reasons: dict[str, str] | None = None,
    learned: Sensitivity = LEARNED,
) -> Choice:
    difference = Interval(6, -0.001, half_width)
    verdicts = {
        name: Verdict(
            kind,  # type: ignore[arg-type]
            None if kind == "reference" or (reasons or {}).get(name) else difference,
            (reasons or {}).get(name, ""),
            margin=0.02,
        )
        for name, kind in {"fp32": "reference", **kinds}.items()
    }
    outcomes = {"fp32": dict.fromkeys(range(6), FP32.outcome)}
    verification = Verification(Proof(margin=0.02), verdicts, outcomes, metric=Metric(), history=[learned])
    return choose(
        candidates,
        verification,
        prefer=prefer,
        target="A100",
        target_is_here=here,
        worth=worth,
        memory_budget_bytes=None if budget is None else budget * GIB,
    )


def test_a_proved_policy_is_told_against_what_runs_today_then_against_fp32() -> None:
    found = candidate("trial 7", 4.8, 200.0)
    choice = decide([FP32, BF16, found], {"autocast bf16": "proved", "trial 7": "proved"})
    assert (choice.kind, choice.name, choice.policy) == ("policy", "trial 7", FOUND)
    assert choice.sentence.startswith(
        "Use the found policy (trial 7): 0.80x the memory (4.80 GiB instead of 6.00 GiB) and 1.00x the throughput of "
        "plain autocast BF16, 0.48x the memory and 2.00x the throughput of FP32, on A100; proved: accuracy at most "
        "0.02 below FP32's (difference -0.001, between -0.005 and +0.003; 6 paired seeds of 40 steps)"
    )


@pytest.mark.parametrize(("memory", "policy"), [(5.85, FOUND), (5.75, FOUND_FP16)], ids=["3 %", "5 % with a scaler"])
def test_a_found_policy_that_gains_too_little_is_not_worth_its_complexity(memory: float, policy: Policy) -> None:
    found = candidate("trial 7", memory, 200.0, policy=policy)
    proved = {"autocast bf16": "proved", "trial 7": "proved"}
    choice = decide([FP32, BF16, found], proved, worth=replace(A100, capacity_bytes=8 * GIB))
    assert (choice.kind, choice.name) == ("autocast", "autocast bf16")
    assert (
        "nothing that was tried is faster than it by 3%, or saves 3% and the 0.08 GiB that would matter"
        in choice.sentence
    )
    settable = Worth(min_gain=0.001, min_gain_with_scaler=0.001, capacity_bytes=8 * GIB, present=AUTOCAST_BF16)
    assert decide([FP32, BF16, found], proved, worth=settable).name == "trial 7"


@pytest.mark.parametrize(
    ("memory", "throughput"), [(0.0993, 66.0), (0.0986, 82.0), (9.92, 88.0), (0.0987, 71.0)], ids=str
)
@pytest.mark.parametrize("prefer", PREFERENCES)
def test_what_is_slower_for_a_saving_that_matters_to_nobody_is_not_recommended(
    memory: float, throughput: float, prefer: Prefer
) -> None:
    """Four recommendations of .7 MiB, 1.4 MiB, 80 MiB and 1.3 MiB of an 80 GB card, slower by 12 to 34 %."""
    reference = candidate("fp32", 10.0 if memory > 1 else 0.1, 100.0, measured=False)
    slow = candidate("autocast bf16", memory, throughput, measured=False)
    assert decide([reference, slow], {"autocast bf16": "proved"}, prefer).name == "fp32"


def test_a_slower_policy_is_recommended_for_memory_that_matters_or_makes_the_batch_fit() -> None:
    slow = candidate("autocast bf16", 8.0, 80.0)
    proved = {"autocast bf16": "proved"}
    assert decide([FP32, slow], proved, "smallest").name == "autocast bf16"
    assert decide([FP32, slow], proved, "fastest").name == "fp32"
    tight = candidate("autocast bf16", 9.8, 80.0)
    assert decide([FP32, tight], proved, "smallest").name == "fp32"
    assert decide([FP32, tight], proved, "smallest", worth=replace(A100, capacity_bytes=9.9 * GIB)).name == (
        "autocast bf16"
    )


def test_fastest_is_never_slower_than_fp32_in_its_own_table() -> None:
    slow = candidate("autocast bf16", 2.0, 76.0, measured=False)
    fp32 = candidate("fp32", 10.0, 100.0, measured=False)
    assert decide([fp32, slow], {"autocast bf16": "proved"}, "fastest").name == "fp32"


def test_of_two_proved_policies_predicted_by_one_model_the_better_trade_wins() -> None:
    fp32 = candidate("fp32", 10.0, 100.0, measured=False)
    small, fast = candidate("a", 5.9, 100.0, measured=False), candidate("b", 6.2, 116.0, measured=False)
    assert decide([fp32, small, fast], {"a": "proved", "b": "proved"}).name == "b"


def test_bf16_without_a_scaler_is_kept_where_fp16_gains_one_percent() -> None:
    half = candidate("half everywhere", 5.94, 200.0, policy=Policy(default="fp16"))
    proved = {"autocast bf16": "proved", "half everywhere": "proved"}
    assert decide([FP32, BF16, half], proved, worth=replace(A100, capacity_bytes=8 * GIB)).name == "autocast bf16"


def test_a_step_bound_by_launches_is_said_to_be_so() -> None:
    fp32 = candidate("fp32", 0.1, 100.0, measured=False)
    fp32 = replace(fp32, outcome=fp32.outcome.model_copy(update={"launch_share": 0.93}))
    slow = candidate("autocast bf16", 0.09, 76.0, measured=False)
    sentence = decide([fp32, slow], {"autocast bf16": "proved"}).sentence
    assert "the step is bound by launches (93% of its predicted time)" in sentence
    assert "saves the 0.80 GiB that would matter on A100" in sentence


def test_what_runs_today_is_not_left_for_want_of_a_gain_but_for_being_slower() -> None:
    fp32, faster = candidate("fp32", 0.1, 100.0, measured=False), candidate("autocast bf16", 0.1, 110.0, measured=False)
    assert decide([fp32, faster], {"autocast bf16": "proved"}).name == "autocast bf16"
    assert decide([fp32, faster], {"autocast bf16": "proved"}, worth=replace(A100, present="fp32")).name == "fp32"
    slower = candidate("autocast bf16", 0.1, 95.0, measured=False)
    assert decide([fp32, slower], {"autocast bf16": "proved"}).name == "fp32"


def test_of_equal_arms_the_one_that_skips_fewer_steps_is_recommended_and_its_scale_is_said() -> None:
    default = candidate("autocast fp16", 6.0, 200.0, skips=4)
    scaled = candidate(
        "autocast fp16, init_scale 4096",
        6.0,
        200.0,
        policy=Policy(default="autocast", grad_scaler=GradScalerSettings(init_scale=4096.0)),
    )
    skipping = Verdict("proved", Interval(4, 0.0, 0.001), "", margin=0.02, skip_rate=0.1)
    verdicts = {
        "fp32": Verdict("reference", None, ""),
        default.name: skipping,
        scaled.name: replace(skipping, skip_rate=0.0),
    }
    found = choose(
        [FP32, default, scaled],
        Verification(Proof(margin=0.02), verdicts, history=[LEARNED]),
        prefer="balanced",
        target="T4",
        target_is_here=False,
        worth=Worth(capacity_bytes=16 * GIB, present="autocast fp16"),
    )
    assert found.name == scaled.name
    assert "plain autocast FP16, init_scale=4096" in found.sentence
    assert "its grad scaler skips 0.0% of the steps, that one's 10.0%" in found.sentence


def test_an_open_policy_is_never_recommended_and_is_named() -> None:
    found = candidate("trial 7", 5.0, 220.0)
    choice = decide([FP32, BF16, found], {"autocast bf16": "proved", "trial 7": "open"})
    assert choice.name == "autocast bf16"
    assert "trial 7) would be better but is not proved" in choice.sentence


@pytest.mark.parametrize(
    ("half_width", "words"),
    [
        (
            0.03,
            "6 seeds of 40 steps cannot prove a margin of 0.02 of accuracy (the smallest margin it could prove is "
            "0.03)",
        ),
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


def test_where_fp32_learned_too_little_nothing_is_recommended_and_the_steps_that_would_do_are_told() -> None:
    learned = Sensitivity(320, Gain(Interval(8, 0.01, 0.03), 0.5, 0.001, False), steps_needed=1280)
    choice = decide([FP32, BF16], {"autocast bf16": "insensitive"}, learned=learned, reasons={"autocast bf16": "x"})
    assert choice.kind == "inconclusive"
    assert "in 320 steps its accuracy went from 0.5 at the start weights to 0.51" in choice.sentence
    assert "about 1280 steps would probably do (--proof-steps 1280)" in choice.sentence


def test_refuted_policies_leave_fp32_which_needs_no_proof() -> None:
    choice = decide([FP32, FP16], {"autocast fp16": "refuted"})
    assert choice.kind == "fp32"
    assert "FP32: autocast FP16 is refuted" in choice.sentence


@pytest.mark.parametrize(
    ("kind", "reason", "choice_kind", "words"),
    [
        ("open", "ran out of time (timeout: 16 s are over) on seed 0", "inconclusive", "ran out of time"),
        ("open", "ran out of memory (out_of_memory: 80 GB) on seed 0", "inconclusive", "ran out of memory"),
        ("failed", "is refused by an operator (unsupported: fft) on seed 0", "fp32", "is refused by an operator"),
        ("failed", "makes the task raise an error (user_error: BCELoss) on seed 0", "fp32", "BCELoss"),
    ],
)
def test_an_end_that_says_nothing_of_precision_is_told_as_what_it_is(
    kind: str, reason: str, choice_kind: str, words: str
) -> None:
    choice = decide([FP32, BF16], {"autocast bf16": kind}, reasons={"autocast bf16": reason})
    assert choice.kind == choice_kind
    assert words in choice.sentence
    assert "lost accuracy" not in choice.sentence


def test_an_arm_whose_trial_timed_out_is_not_said_to_have_lost_accuracy() -> None:
    late = replace(BF16, outcome=Outcome(kind="timeout", message="16 s are over"))
    sentence = decide([FP32, late], {}).sentence
    assert "autocast BF16 could not be tried (timeout: 16 s are over)" in sentence


def test_without_the_target_the_recommendation_is_provisional_and_with_it_not() -> None:
    assert decide([FP32, FP16], {"autocast fp16": "proved"}).provisional
    assert "provisional: A100 was not there" in decide([FP32, FP16], {"autocast fp16": "proved"}).sentence
    there = decide([FP32, FP16], {"autocast fp16": "proved"}, here=True)
    assert not there.provisional
    assert "provisional" not in there.sentence


@pytest.mark.parametrize(("prefer", "expected"), [("fastest", "fast"), ("smallest", "small"), ("balanced", "even")])
def test_the_preference_decides(prefer: Prefer, expected: str) -> None:
    several = [candidate("fast", 9.0, 300.0), candidate("small", 4.0, 100.0), candidate("even", 4.5, 220.0)]
    assert in_order([FP32, *several], FP32, prefer, A100)[0].name == expected


def test_a_gain_that_lies_within_the_noise_of_measured_pairs_is_none() -> None:
    noisy = Number(value=1.1, kind="measured", low=0.98, high=1.25)
    sure = Number(value=1.1, kind="measured", low=1.06, high=1.14)
    arm = candidate("trial 7", 10.0, 110.0)
    assert best([FP32, replace(arm, paired=Ratios(throughput=noisy))], FP32, "fastest", A100).name == "fp32"
    assert best([FP32, replace(arm, paired=Ratios(throughput=sure))], FP32, "fastest", A100).name == "trial 7"


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


FACTORS = st.floats(0.3, 1.6).map(lambda value: round(value, 3))
ARMS = st.sampled_from(
    [("autocast bf16", FOUND), ("autocast fp16", FOUND), ("a", FOUND), ("b", FOUND_FP16), ("c", FOUND)]
)


@settings(max_examples=400, deadline=None)
@given(
    rows=st.lists(st.tuples(ARMS, FACTORS, FACTORS), min_size=1, max_size=5, unique_by=lambda row: row[0][0]),
    prefer=st.sampled_from(PREFERENCES),
    measured=st.booleans(),
    size=st.sampled_from([0.01, 1.0, 40.0]),
)
def test_no_pick_is_beaten_in_its_own_table_or_gains_less_than_it_must(
    rows: list[tuple[tuple[str, Policy], float, float]], prefer: Prefer, measured: bool, size: float
) -> None:
    reference = candidate("fp32", size, 100.0, measured=measured)
    others = [candidate(n, m * size, t * 100, measured=measured, policy=p) for (n, p), m, t in rows]
    picked = best([reference, *others], reference, prefer, A100)
    memory, times = numbers(picked)
    for other in [reference, *others]:
        if other is picked:
            continue
        more, faster = numbers(other)
        simpler = other.simplicity <= picked.simplicity
        assert not (more <= memory * (1 - 0.051) and faster >= times * 1.051 and (simpler or matters(memory - more)))
        assert not (simpler and more <= memory * 0.998 and faster >= times * 1.002)
        if other.name not in ("fp32", "autocast bf16") or picked is reference or simpler is False:
            continue
        needed = A100.needed(picked, other)
        if picked.name != A100.present:
            saves = memory <= more * (1 - needed) * 1.001 and matters(more - memory)
            assert saves or times >= faster * (1 + needed) * 0.999
        if times < 0.98 * faster:
            assert matters(more - memory)


def numbers(arm: Candidate) -> tuple[float, float]:
    assert arm.outcome.peak_memory_bytes is not None
    assert arm.outcome.throughput_samples_per_second is not None
    return arm.outcome.peak_memory_bytes.value, arm.outcome.throughput_samples_per_second.value


def matters(num_bytes: float) -> bool:
    return num_bytes >= 0.8 * GIB * 0.999

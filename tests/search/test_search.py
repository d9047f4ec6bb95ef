"""Whole searches with a measurement computed from the policy: order, storage, resume, feasibility, files."""

from __future__ import annotations

import getpass
import json
import os
import socket
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState
from toys import FakeMeasure, TinyNet, TwoAtOnce, ran, tiny_plan, tiny_task

import autoprec.search.pipeline as pipeline
from autoprec.apply import apply_policy
from autoprec.errors import StudyError, TaskError, UsageError
from autoprec.policy import Policy, load_policy
from autoprec.search.events import Events
from autoprec.search.pipeline import SearchResult, run_search
from autoprec.search.plan import SearchPlan
from autoprec.search.proof import Proof
from autoprec.search.worth import Worth
from autoprec.trials.outcome import Outcome, TrialSettings


def run(folder: Path, measure: FakeMeasure | None = None, **settings: object) -> SearchResult:
    return run_search(tiny_plan(folder, **settings), measure or FakeMeasure(noise=0.001))


def load(plan: SearchPlan) -> optuna.Study:
    return optuna.load_study(study_name=plan.study_name, storage=f"sqlite:///{plan.folder / 'study.db'}")


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    """One search of 9 trials, read by many tests."""
    return run(tmp_path_factory.mktemp("searched"), n_trials=9)


def test_the_baselines_run_first_then_the_warm_starts_then_the_sampler(searched: SearchResult) -> None:
    assert [record.arm for record in searched.records][:6] == [
        "fp32",
        "autocast fp16",
        "autocast bf16",
        "half but norms and head",
        "half everywhere",
        "deep end in fp32",
    ]
    assert searched.records[0].policy == Policy(default="fp32")
    assert searched.records[1].policy == Policy(default="autocast", dtype="fp16")
    assert searched.records[2].policy == Policy(default="autocast", dtype="bf16")
    assert all(record.arm == "" for record in searched.records[6:])


def test_a_plain_optuna_user_finds_named_objectives_parameters_constraints_and_outcomes(searched: SearchResult) -> None:
    study = load(searched.plan)
    assert study.metric_names == ["peak_memory_bytes", "throughput_samples_per_second", "accuracy"]
    assert [d.name for d in study.directions] == ["MINIMIZE", "MAXIMIZE", "MAXIMIZE"]
    trial = study.trials[0]
    assert {"precision/norm", "precision/head", "grad_scaler/init_scale", "optimizer/eps"} <= set(trial.params)
    assert set(trial.constraints) == {"finite", "skip_rate", "loss_gap"}
    assert trial.user_attrs["outcome"]["kind"] == "ok"
    assert json.loads(json.dumps(trial.user_attrs)) == trial.user_attrs


def test_the_storage_holds_one_study_and_the_runs_of_the_proof_are_no_trials_of_it(searched: SearchResult) -> None:
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{searched.folder / 'study.db'}")
    assert len(study.trials) == len(searched.records)
    assert sum(name.startswith("autoprec:verification:") for name in study.user_attrs) >= 9


def test_only_the_bf16_baseline_has_the_other_dtype(searched: SearchResult) -> None:
    dtypes = [trial.params["autocast/dtype"] for trial in load(searched.plan).trials]
    assert [i for i, dtype in enumerate(dtypes) if dtype == "bf16"] == [2]


def test_n_trials_counts_finished_runs_in_all_and_the_proof_is_not_counted(searched: SearchResult) -> None:
    assert sum(not record.is_cached for record in searched.records) == 9
    assert searched.verification.num_seeds == searched.plan.settings.proof.looks[0]


def test_the_same_search_again_runs_nothing_and_says_the_same(tmp_path: Path) -> None:
    first = run(tmp_path, n_trials=7)
    measure = FakeMeasure(noise=0.001)
    again = run(tmp_path, measure, n_trials=7)
    assert measure.order == []
    assert again.choice == first.choice
    assert len(again.records) == len(first.records)


def test_more_trials_go_on_where_the_study_stopped(tmp_path: Path) -> None:
    run(tmp_path, n_trials=6)
    measure = FakeMeasure(noise=0.001)
    run(tmp_path, measure, n_trials=8)
    assert sum(seed == 0 for _, seed in measure.order) == 2


@pytest.mark.parametrize("stop_at", [1, 3, 7, 8])
@pytest.mark.parametrize("measure", [FakeMeasure, TwoAtOnce], ids=["one at a time", "two at once"])
def test_an_interrupted_search_ends_where_an_unbroken_one_does(
    measure: type[FakeMeasure], stop_at: int, tmp_path: Path
) -> None:
    whole = run(tmp_path / "whole", measure(), n_trials=9)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", measure(stop_at=stop_at), n_trials=9)
    assert (tmp_path / "parts" / "policy.json").exists() == (stop_at > 1)
    parts = run(tmp_path / "parts", measure(), n_trials=9)
    assert ran(parts) == ran(whole)
    assert parts.choice.name == whole.choice.name


def test_trials_that_run_at_once_are_told_in_order_whichever_finishes_first(tmp_path: Path) -> None:
    first, second = (run(tmp_path / name, TwoAtOnce(), n_trials=9) for name in ("a", "b"))
    assert [record.number for record in first.records] == sorted(record.number for record in first.records)
    assert ran(first) == ran(second)
    assert len(ran(first)) == 9
    assert ran(first)[:6] == ran(run(tmp_path / "c", n_trials=9))[:6]


def test_the_trials_that_run_beside_an_interrupted_one_are_stopped_and_failed(tmp_path: Path) -> None:
    measure = TwoAtOnce(stop_at=3)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, measure, n_trials=9)
    assert measure.is_stopped
    states = [trial.state for trial in load(tiny_plan(tmp_path, n_trials=9)).trials]
    assert states == [TrialState.COMPLETE, TrialState.COMPLETE, TrialState.FAIL, TrialState.FAIL]


def test_an_interrupted_trial_is_failed_and_run_again(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, FakeMeasure(stop_at=2), n_trials=6)
    result = run(tmp_path, n_trials=6)
    states = [trial.state for trial in load(result.plan).trials]
    assert states[1] == TrialState.FAIL
    assert [record.arm for record in result.records][:2] == ["fp32", "autocast fp16"]


def test_a_trial_that_a_kill_left_running_is_failed_on_resume(tmp_path: Path) -> None:
    plan = run(tmp_path, n_trials=6).plan
    study = load(plan)
    study.ask()
    notes: list[str] = []

    class Listener(Events):
        def note(self, text: str) -> None:
            notes.append(text)

    run_search(plan, FakeMeasure(noise=0.001), events=Listener())
    assert [t.state for t in load(plan).trials if t.number == len(study.trials) - 1] == [TrialState.FAIL]
    assert any("marked as failed" in note for note in notes)


def test_an_equal_policy_is_never_run_twice_and_an_exhausted_space_ends_the_search(tmp_path: Path) -> None:
    space = tmp_path / "small.toml"
    space.write_text(
        'name = "small"\nfollowers = ["BatchNorm2d", "ReLU"]\n'
        '[[rules]]\nnames = ["head"]\nchoices = ["autocast"]\nreason = "as it is"\n'
    )
    measure = FakeMeasure(noise=0.001)
    result = run(tmp_path / "run", measure, n_trials=100, space=space, sampler="random")
    assert max(measure.calls.values()) == 1
    ran = [record for record in result.records if not record.is_cached]
    # the convolution has 2 precisions in effect, the norm 3, the head 1; and stock FP32 and BF16
    assert len(ran) == 2 * 3 + 2
    again = FakeMeasure(noise=0.001)
    run(tmp_path / "run", again, n_trials=100, space=space, sampler="random")
    assert again.order == []


def test_a_policy_that_diverges_teaches_the_sampler_with_finite_worst_values(tmp_path: Path) -> None:
    def fail(policy: Policy) -> str | None:
        return "non_finite_loss" if policy.modules.get("norm") == "fp16" else None

    result = run(tmp_path, FakeMeasure(noise=0.001, fail=fail), n_trials=8)
    trial = load(result.plan).trials[4]
    assert trial.user_attrs["arm"] == "half everywhere"
    assert trial.state == TrialState.COMPLETE
    assert trial.values == [2e9, 0.0, 0.0]
    assert trial.constraints["finite"] > 0
    assert trial.constraints["loss_gap"] > 0
    assert result.policy.modules.get("norm") != "fp16"
    assert "half everywhere" not in (result.folder / "front.json").read_text()


def test_an_aborted_trial_is_pruned_with_its_constraints_and_counts_as_run(tmp_path: Path) -> None:
    class Aborting(FakeMeasure):
        def __call__(self, policy: Policy, settings: TrialSettings) -> Outcome:
            outcome = super().__call__(policy, settings)
            losses = [3.0 if policy.modules.get("norm") == "fp16" else 1.0] * 20
            reason = settings.abort.reason(losses, num_skipped=0, num_steps=28) if settings.abort else ""
            ended = {"kind": "aborted", "message": reason} if reason else {}
            return outcome.model_copy(update={"train_losses": losses, "num_steps_planned": 28, **ended})

    result = run(tmp_path, Aborting(noise=0.001), n_trials=9)
    trial = load(result.plan).trials[4]
    assert trial.user_attrs["arm"] == "half everywhere"
    assert (trial.state, trial.values) == (TrialState.PRUNED, None)
    assert trial.constraints == {"finite": -1.0, "skip_rate": -0.25, "loss_gap": pytest.approx(1.5)}
    assert sum(not record.is_cached for record in result.records) == 9
    again = Aborting(noise=0.001)
    run(tmp_path, again, n_trials=9)
    assert again.order == []


def test_a_policy_whose_loss_is_far_above_fp32_is_infeasible(tmp_path: Path) -> None:
    result = run(tmp_path, FakeMeasure(effect=lambda p: -0.6 if p.modules.get("norm") == "fp16" else 0.0), n_trials=6)
    by_arm = {record.arm: record for record in result.records}
    assert not by_arm["half everywhere"].is_feasible
    assert by_arm["half but norms and head"].is_feasible


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("user_error", TaskError, "the task fails in FP32"),
        ("out_of_memory", StudyError, "smaller --batch-size"),
        ("non_finite_loss", StudyError, "FP32 does not train"),
    ],
)
def test_where_fp32_gives_nothing_the_search_stops(
    tmp_path: Path, kind: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        run(tmp_path, FakeMeasure(fail=lambda p: kind))
    assert not (tmp_path / "policy.json").exists()


def test_when_nothing_low_survives_fp32_is_recommended(tmp_path: Path) -> None:
    result = run(tmp_path, FakeMeasure(fail=lambda p: "non_finite_loss" if p.low_precisions else None), n_trials=6)
    assert result.choice.kind == "fp32"
    assert load_policy(tmp_path / "policy.json").default == "fp32"


def test_where_precision_changes_nothing_fp32_stays(tmp_path: Path) -> None:
    result = run(tmp_path, FakeMeasure(noise=0.001, savings=False), n_trials=8)
    assert (result.choice.kind, result.choice.name) == ("autocast", "autocast bf16")
    told = "Keep plain autocast BF16: 1.00x the memory (0.93 GiB instead of 0.93 GiB) and 1.00x the throughput of FP32"
    assert result.choice.sentence.startswith(told)
    against_fp32 = run(tmp_path / "fp32", FakeMeasure(noise=0.001, savings=False), n_trials=8, compare="fp32")
    assert against_fp32.choice.kind == "fp32"


def test_where_all_finalists_are_refuted_the_next_best_are_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The found policy that is proved first is worse in a long run alone: the trials do not show it, the proof does."""

    class LateHarm(FakeMeasure):
        harmed: str | None = None

        def __call__(self, policy: Policy, settings: TrialSettings) -> Outcome:
            outcome = super().__call__(policy, settings)
            if settings.anneal and policy.modules and self.harmed is None:
                self.harmed = policy.to_json()
            is_harmed = settings.anneal and policy.to_json() == self.harmed
            return Outcome(kind="non_finite_loss", message="as asked") if is_harmed else outcome

    monkeypatch.setattr(pipeline, "MAX_FINALISTS", 1)
    measure = LateHarm(noise=0.001)
    result = run(tmp_path, measure, n_trials=20, sampler="random", worth=Worth(1e-3, 1e-3))
    found = [c for c in result.candidates if c.is_found]
    refuted = [c for c in found if result.verification.verdicts[c.name].kind == "refuted"]
    assert [c.policy.to_json() for c in refuted] == [measure.harmed]
    assert result.choice.kind == "policy"
    assert result.policy.modules


def test_where_the_proof_refutes_autocast_a_policy_need_no_more_be_better_than_it(tmp_path: Path) -> None:
    """The norm diverges in a long run alone, so that autocast, which saves more, looks better in the trials."""

    class LateHarm(FakeMeasure):
        def __call__(self, policy: Policy, settings: TrialSettings) -> Outcome:
            is_harmed = settings.anneal and policy.low_precisions and policy.modules.get("norm") != "fp32"
            outcome = super().__call__(policy, settings)
            return Outcome(kind="non_finite_loss", message="as asked") if is_harmed else outcome

    result = run(tmp_path, LateHarm(noise=0.001), n_trials=6, worth=Worth(min_memory_share=0.0))
    assert result.verification.verdicts["autocast fp16"].kind == "refuted"
    assert result.choice.kind == "policy"
    assert result.policy.modules["norm"] == "fp32"


def test_noise_above_the_margin_is_inconclusive_and_writes_fp32(tmp_path: Path) -> None:
    measure = FakeMeasure(noise=0.6, effect=lambda policy: -0.3 if policy.low_precisions else 0.0)
    result = run(tmp_path, measure, n_trials=6)
    assert not result.is_conclusive
    policy = load_policy(tmp_path / "policy.json")
    assert policy.default == "fp32"
    assert policy.recommendation is not None
    assert policy.recommendation.choice == "inconclusive"


def test_other_settings_are_another_study_and_an_explicit_name_with_them_is_refused(tmp_path: Path) -> None:
    first = run(tmp_path, n_trials=6, study_name="mine")
    assert tiny_plan(tmp_path).study_name != tiny_plan(tmp_path, proof=Proof(margin=0.02)).study_name
    with pytest.raises(UsageError, match=r"proof.margin was absent, now 0.02"):
        run(tmp_path, n_trials=6, study_name="mine", proof=Proof(margin=0.02))
    assert first.folder == tmp_path


def test_a_folder_with_another_studys_policy_is_refused(tmp_path: Path) -> None:
    run(tmp_path, n_trials=6)
    with pytest.raises(UsageError, match="holds the policy of tiny-"):
        run(tmp_path, n_trials=6, proof=Proof(margin=0.02))


def test_a_second_search_in_the_same_folder_waits_for_the_first(tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path)

    def measure(*_: object) -> None:
        run_search(plan, FakeMeasure())

    with pytest.raises(StudyError, match=rf"another search \(process {os.getpid()}\) is running in"):
        run_search(plan, measure)  # type: ignore[arg-type]


def test_a_study_of_someone_else_is_not_touched(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'theirs.db'}"
    theirs = optuna.create_study(study_name="mine", storage=url)
    theirs.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    with pytest.raises(StudyError, match="was not made by autoprec"):
        run(tmp_path / "out", storage=url, study_name="mine")


@pytest.mark.parametrize("sampler", ["policy", "tpe", "nsga2", pytest.param("gp", marks=pytest.mark.slow), "random"])
def test_every_sampler_runs_a_search(tmp_path: Path, sampler: str) -> None:
    result = run(tmp_path, n_trials=12 if sampler == "gp" else 8, sampler=sampler)
    assert result.is_conclusive


def test_the_policy_file_applies_to_the_model_and_carries_its_evidence(searched: SearchResult) -> None:
    policy = load_policy(searched.folder / "policy.json")
    apply_policy(TinyNet(), policy)
    assert policy.evidence is not None
    assert set(policy.evidence.arms) >= {"fp32", "autocast fp16", "autocast bf16"}
    assert policy.evidence.units["norm"].precision == "fp16"
    assert policy.evidence.verification is not None
    verification = policy.evidence.verification
    assert verification.max_lost_share == 0.1
    assert verification.margin == pytest.approx(0.1 * verification.gain)
    assert verification.sensitive
    assert policy.recommendation is not None
    assert policy.recommendation.provisional
    assert policy.provenance is not None
    assert policy.provenance.study_name == searched.plan.study_name


def test_the_front_holds_only_feasible_policies_that_nothing_beats(searched: SearchResult) -> None:
    front = json.loads((searched.folder / "front.json").read_text())
    assert front["picks"]["smallest"] in [member["name"] for member in front["front"]]
    kinds = {number["kind"] for member in front["front"] for number in member["numbers"].values()}
    assert kinds <= {"measured", "emulated", "computed", "predicted"}
    for member in front["front"]:
        Policy(**member["policy"])


def test_nothing_private_is_in_any_file_that_a_search_writes(searched: SearchResult) -> None:
    private = {socket.gethostname(), str(Path.home()), str(searched.folder), os.getcwd()}
    user = getpass.getuser()
    for path in searched.folder.rglob("*"):
        content = path.read_bytes().decode("utf-8", "replace")
        found = [text for text in private if len(text) > 3 and text in content]
        assert found == [], path.name
        if len(user) > 4:
            assert user not in content, path.name


def test_a_task_with_no_batches_is_an_error_before_any_trial(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"train_batches: there are 0 batches \(an empty list\)"):
        tiny_plan(tmp_path, task=tiny_task(train_batches=[]))
    assert list(tmp_path.iterdir()) == []


def test_after_the_time_no_new_trial_begins_and_the_proof_that_had_no_time_is_told_as_that(tmp_path: Path) -> None:
    class Notes(Events):
        def __init__(self) -> None:
            self.notes: list[str] = []

        def note(self, message: str) -> None:
            self.notes.append(message)

    events = Notes()
    plan = tiny_plan(tmp_path, n_trials=9, timeout_seconds=1e-6)
    result = run_search(plan, FakeMeasure(noise=0.001), events=events)
    assert [record.arm for record in result.records] == ["fp32", "autocast fp16", "autocast bf16"]
    assert result.verification.verdicts["fp32"].kind == "reference"
    assert any("the time given is over after 3 of 9 trials" in note for note in events.notes)
    assert result.verification.verdicts["autocast bf16"].kind == "open"
    assert "the proof could not be made: the time given is over" in result.choice.sentence
    assert result.choice.kind == "inconclusive"
    assert len(run(tmp_path, n_trials=9).records) >= 9


def test_steps_are_those_of_a_trial_with_its_warm_up() -> None:
    plain = TrialSettings()
    assert plain.with_steps(None) == plain
    shapes = [(plain.with_steps(n).warmup_steps, plain.with_steps(n).measured_steps) for n in (2, 9, 28, 100)]
    assert shapes == [(1, 1), (3, 6), (8, 20), (8, 92)]
    with pytest.raises(UsageError, match="steps is 1; at least 2"):
        plain.with_steps(1)

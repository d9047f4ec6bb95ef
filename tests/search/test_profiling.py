"""A search with a profile: taken once, kept beside the study, used by the sampler, shown in the policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import optuna
import pytest
import torch
from toys import FakeMeasure, tiny_plan

from autoprec.errors import TaskError
from autoprec.policy import Policy, load_policy
from autoprec.probes.ranges import ExponentHistogram
from autoprec.profiling.profile import Profile, UnitProfile
from autoprec.profiling.run import take_profile
from autoprec.search.events import Events
from autoprec.search.pipeline import SearchResult, run_search
from autoprec.search.profiling import Lessons, _told
from autoprec.trials.outcome import NonFinite, Outcome, TrialSettings


class ProfiledMeasure(FakeMeasure):
    """Takes a real profile of the tiny task; `overflowing` shifts the activations of one unit beyond FP16."""

    def __init__(self, *, overflowing: str = "", broken: bool = False, **settings: object) -> None:
        super().__init__(noise=0.001, **settings)
        self.num_profiles = 0
        self._overflowing, self._broken = overflowing, broken

    def profile(self, units: Sequence[str], settings: TrialSettings, study_name: str) -> Profile:
        self.num_profiles += 1
        if self._broken:
            raise TaskError("the process ended: signal SIGKILL\nmore")
        profile = take_profile(tiny_plan().task, units, settings, study_name=study_name)
        if self._overflowing:
            unit = profile.units[self._overflowing]
            wide = unit.model_copy(update={"activations": unit.activations.model_copy(update={"maximum": 3e5})})
            profile = profile.model_copy(update={"units": {**profile.units, self._overflowing: wide}})
        return profile


class Notes(Events):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def search(folder: Path, measure: FakeMeasure, events: Events | None = None, **settings: object) -> SearchResult:
    return run_search(tiny_plan(folder, sampler="policy", **settings), measure, events=events)


def test_a_profile_is_taken_once_and_kept_beside_the_study(tmp_path: Path) -> None:
    measure = ProfiledMeasure()
    result = search(tmp_path, measure, n_trials=7)
    kept = Profile.load(tmp_path / "profile.json")
    assert kept.study_name == result.plan.study_name
    assert set(kept.units) == set(result.plan.unit_calls)
    search(tmp_path, measure, n_trials=9)
    assert measure.num_profiles == 1


@pytest.mark.parametrize("how", ["torn", "gone"])
def test_a_profile_file_that_is_lost_is_written_again_from_the_study(how: str, tmp_path: Path) -> None:
    measure = ProfiledMeasure()
    search(tmp_path, measure, n_trials=6)
    path = tmp_path / "profile.json"
    whole = path.read_text()
    if how == "gone":
        path.unlink()
    else:
        path.write_text(whole[:50])
    search(tmp_path, measure, n_trials=7)
    assert measure.num_profiles == 1
    assert path.read_text() == whole


def test_the_unit_that_overflows_is_never_proposed_in_half_and_the_reason_is_told(tmp_path: Path) -> None:
    notes = Notes()
    result = search(tmp_path, ProfiledMeasure(overflowing="norm"), notes, n_trials=9)
    sampled = [record for record in result.records if not record.arm]
    assert sampled
    assert all(record.policy.modules.get("norm", record.policy.default) == "fp32" for record in sampled)
    assert any(text.startswith("norm: fp32, not searched (overflows FP16") for text in notes.texts)


def test_the_headroom_of_the_loss_scale_is_told_in_octaves() -> None:
    unit = UnitProfile(activation_gradients=ExponentHistogram.of(torch.tensor([0.25, 1.0, 4.0])))
    profile = Profile(num_steps=5, watched_steps=[1], losses=[1.0], gradient_maxima=[4.0], units={"norm": unit})
    lessons = Lessons(fixed={"grad_scaler/init_scale": 1024.0}, profile=profile)
    (text,) = _told(lessons)
    assert text.startswith(
        "init_scale 1024: +4.0 octaves below overflow, torch's 65536 -2.0; safe window 2^-14 to 2^12"
    )


def test_the_policy_carries_the_profiles_evidence_for_each_unit(tmp_path: Path) -> None:
    result = search(tmp_path, ProfiledMeasure(), n_trials=8)
    evidence = load_policy(tmp_path / "policy.json").evidence
    assert evidence is not None
    for name in result.plan.unit_calls:
        unit = evidence.units[name]
        assert unit.error_score is not None
        assert unit.saved_bytes is not None
        assert unit.saved_bytes.kind == "computed"


def test_a_search_whose_profile_fails_goes_on_without_it(tmp_path: Path) -> None:
    notes = Notes()
    result = search(tmp_path, ProfiledMeasure(broken=True), notes, n_trials=8)
    assert result.is_conclusive
    assert "no profile: the process ended: signal SIGKILL" in notes.texts
    assert not (tmp_path / "profile.json").exists()


def test_the_first_bad_unit_of_a_failed_trial_is_kept_for_the_sampler(tmp_path: Path) -> None:
    class Failing(ProfiledMeasure):
        def __call__(self, policy: Policy, settings: TrialSettings) -> Outcome:
            if policy.modules.get("norm") == "fp16":
                place = NonFinite(step=1, module="norm", what="forward output")
                return Outcome(kind="non_finite_loss", first_non_finite=place)
            return super().__call__(policy, settings)

    result = search(tmp_path, Failing(), n_trials=12)
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'study.db'}")
    failed = [trial for trial in study.trials if trial.user_attrs.get("failed_unit")]
    assert failed
    assert {trial.user_attrs["failed_unit"] for trial in failed} == {"precision/norm"}
    later = [r for r in result.records if not r.arm and r.number > failed[0].number]
    assert all(record.policy.modules.get("norm") != "fp16" for record in later)


@pytest.mark.parametrize("n_trials", [8, 12])
def test_the_policy_sampler_finds_at_least_what_the_warm_starts_give(tmp_path: Path, n_trials: int) -> None:
    result = search(tmp_path, ProfiledMeasure(), n_trials=n_trials)
    best = min(r.outcome.peak_memory_bytes.value for r in result.records if r.is_feasible)
    arms = min(r.outcome.peak_memory_bytes.value for r in result.records if r.is_feasible and r.arm)
    assert best <= arms

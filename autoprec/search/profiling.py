"""The profile of a search: taken once, kept beside the study, and turned into what the sampler starts from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from optuna.study import Study

from autoprec.errors import AutoprecError, StudyError
from autoprec.policy import GradScalerSettings
from autoprec.profiling.profile import Profile
from autoprec.profiling.scaler_choice import scale_window
from autoprec.profiling.scaler_replay import headroom_octaves
from autoprec.search.events import Events
from autoprec.search.lookahead import Measure
from autoprec.search.plan import SearchPlan
from autoprec.search.presence import Presence
from autoprec.search.profile_prior import Lessons, learn_from_profile, plain_lessons
from autoprec.trials.outcome import TrialSettings

__all__ = ["Lessons", "Profiler", "learn"]

FILE_NAME = "profile.json"
PROFILE = "autoprec:profile"
"""User attribute of the study: the profile, for processes that have no part in the folder."""
MAX_NAMES = 6


@runtime_checkable
class Profiler(Protocol):
    """A measurement that can also take a profile."""

    def profile(self, units: Sequence[str], settings: TrialSettings, study_name: str) -> Profile: ...


def learn(plan: SearchPlan, measure: Measure, events: Events, presence: Presence) -> Lessons:
    """Return what the profile teaches: the one that the study keeps, else one that is taken now, by one process alone.

    Without one (the measurement takes none, or it failed: the FP32 baseline will say why) the call order is all.
    """
    with presence.turn("profile"):
        profile = _stored(presence.study)
        if profile is None:
            profile = _load(plan) or _take(plan, measure, events)
            if profile is not None:
                presence.study.set_user_attr(PROFILE, profile.model_dump(mode="json"))
    if profile is None:
        return plain_lessons(plan.parameters, plan.unit_calls)
    if presence.mark["role"] == "search" and _load(plan) is None:
        profile.save(plan.folder / FILE_NAME)
    lessons = learn_from_profile(
        profile, plan.parameters, plan.unit_calls, max_loss_gap=plan.settings.limits.max_loss_gap
    )
    for text in _told(lessons):
        events.note(text)
    return lessons


def _take(plan: SearchPlan, measure: Measure, events: Events) -> Profile | None:
    if not isinstance(measure, Profiler):
        return None
    try:
        profile = measure.profile(list(dict.fromkeys(plan.unit_calls)), plan.trial, plan.study_name)
    except AutoprecError as error:
        events.note(f"no profile: {str(error).splitlines()[0]}")
        return None
    events.profile_taken(profile)
    return profile


def _stored(study: Study) -> Profile | None:
    """Return the profile that the study keeps; one of another version of its form is taken again."""
    found = study.user_attrs.get(PROFILE)
    try:
        return None if found is None else Profile.model_validate(found)
    except ValueError:
        return None


def _told(lessons: Lessons) -> list[str]:
    """Return one sentence on the loss scale, and one for each reason why decisions are not searched."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for name, reason in lessons.reasons.items():
        by_reason.setdefault((reason, lessons.prior.pinned[f"precision/{name}"]), []).append(name)
    told = []
    for (reason, choice), names in by_reason.items():
        shown = ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")
        told.append(f"{shown}: {choice}, not searched ({reason})")
    return [*_scale_told(lessons), *told]


def _scale_told(lessons: Lessons) -> list[str]:
    """Say which initial scale was chosen and how often gradients may double before it overflows."""
    profile, scale = lessons.profile, lessons.fixed.get("grad_scaler/init_scale")
    if profile is None or not isinstance(scale, float):
        return []
    room, window = headroom_octaves(profile.gradients.maximum, scale), scale_window(profile.gradients)
    if room is None:
        return []
    low, high = (round(math.log2(end)) for end in (window.low, window.high))
    torchs = headroom_octaves(profile.gradients.maximum, GradScalerSettings().init_scale)
    return [
        f"init_scale {scale:g}: {room:+.1f} octaves below overflow, torch's 65536 {torchs:+.1f}; safe window 2^{low} "
        f"to 2^{high} (measured in {profile.num_steps} FP32 steps)"
    ]


def _load(plan: SearchPlan) -> Profile | None:
    """Return the profile in the folder where it is this study's; a torn or old one is taken again."""
    path = plan.folder / FILE_NAME
    try:
        profile = Profile.load(path) if path.exists() else None
    except StudyError:
        return None
    return profile if profile is not None and profile.study_name == plan.study_name else None

"""The profile of a search: taken once, kept beside the study, and turned into what the sampler starts from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from autoprec.errors import AutoprecError, StudyError
from autoprec.policy import GradScalerSettings
from autoprec.profiling.profile import Profile
from autoprec.profiling.scaler_choice import scale_window
from autoprec.profiling.scaler_replay import headroom_octaves
from autoprec.search.events import Events
from autoprec.search.lookahead import Measure
from autoprec.search.plan import SearchPlan
from autoprec.search.profile_prior import Lessons, learn_from_profile, plain_prior
from autoprec.trials.outcome import TrialSettings

__all__ = ["Lessons", "Profiler", "learn"]

FILE_NAME = "profile.json"
MAX_NAMES = 6


@runtime_checkable
class Profiler(Protocol):
    """A measurement that can also take a profile."""

    def profile(self, units: Sequence[str], settings: TrialSettings, study_name: str) -> Profile: ...


def learn(plan: SearchPlan, measure: Measure, events: Events) -> Lessons:
    """Return what the profile teaches: the one beside the study, else a new one, which is then written there.

    Without one (the measurement takes none, or it failed: the FP32 baseline will say why) the call order is all.
    """
    profile = _load(plan)
    if profile is None and isinstance(measure, Profiler):
        try:
            profile = measure.profile(list(dict.fromkeys(plan.unit_calls)), plan.trial, plan.study_name)
        except AutoprecError as error:
            events.note(f"no profile: {str(error).splitlines()[0]}")
        else:
            profile.save(plan.folder / FILE_NAME)
            events.profile_taken(profile)
    if profile is None:
        return Lessons(plain_prior(plan.parameters, plan.unit_calls))
    lessons = learn_from_profile(
        profile, plan.parameters, plan.unit_calls, max_loss_gap=plan.settings.limits.max_loss_gap
    )
    for text in _told(lessons):
        events.note(text)
    return lessons


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

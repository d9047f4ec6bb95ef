"""What a fork server imports once, so that each new worker process starts with it."""

from __future__ import annotations

import autoprec.estimates.step
import autoprec.tasks.vision
import autoprec.trials.runner
import autoprec.trials.worker  # noqa: F401

__all__: list[str] = []

"""Importing this loads what a worker process needs; a fork server does so once for all of them."""

from __future__ import annotations

import importlib

from autoprec.trials.lifeline import loading

__all__ = ["MODULES"]

MODULES = ("autoprec.estimates", "autoprec.tasks.vision", "autoprec.trials.runner", "autoprec.trials.child")

with loading():
    for name in MODULES:
        importlib.import_module(name)

"""Importing this loads what a worker process needs; a fork server does so once for all of them."""

from __future__ import annotations

import importlib

from autoprec.trials.lifeline import ending_with_parent

__all__ = ["MODULES"]

MODULES = ("autoprec.estimates", "autoprec.tasks.vision", "autoprec.trials.runner", "autoprec.trials.child")

with ending_with_parent():
    for name in MODULES:
        importlib.import_module(name)

"""The command line: the only place that prints or exits. torch and optuna load inside the commands that need them."""

from autoprec.cli.app import main

__all__ = ["main"]

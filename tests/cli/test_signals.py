"""Ctrl-C, SIGTERM and SIGHUP: the first asks, the second ends, and what is ignored stays ignored."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from autoprec.cli.signals import interruptible

SCRIPT = """
import sys, time
from autoprec.cli.signals import interruptible
try:
    with interruptible():
        print("ready", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    print("asked", flush=True)
    sys.exit(7)
"""
SLOW_TO_END = """
import time
from autoprec.cli.signals import interruptible
with interruptible():
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("ending", flush=True)
        time.sleep(60)
"""


HEARD = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""
"""A shell that starts the tests in the background, or nohup, leaves these ignored."""


def start(script: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HEARD + script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_the_first_signal_asks(number: signal.Signals) -> None:
    process = start(SCRIPT)
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert (output, process.returncode) == ("asked\n", 7)


def test_the_second_signal_ends_at_once() -> None:
    process = start(SLOW_TO_END)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "ending\n"
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert time.monotonic() - started < 30  # half of the sleep that it cuts short
    process.stdout.close()


def test_handlers_come_back_and_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    of_tests = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        own = signal.getsignal(signal.SIGINT)
        with interruptible():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGINT) != own
        assert signal.getsignal(signal.SIGINT) == own
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGINT, of_tests)

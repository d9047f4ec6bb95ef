"""What a guard notes of each step, and where it writes that: a CSV file, TensorBoard, or an object of one's own."""

from __future__ import annotations

import contextlib
import csv
import logging
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from autoprec.errors import UsageError

__all__ = ["CsvLog", "GuardEvent", "GuardRecord", "Log", "ScalarWriter", "TensorBoardLog", "open_log"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GuardEvent:
    """Something that a person should know.

    Attributes:
        step: counts from 1.
        kind: `named`, `moved`, `kept` (a unit could not be moved), `buffers`, `floor`.
        unit: the module's name; "" where the event is about no module, or about the model itself.
        message: one sentence.
    """

    step: int
    kind: str
    unit: str
    message: str


@dataclass(frozen=True, slots=True)
class GuardRecord:
    """One optimizer step as the guard saw it; None where a value was not given or not looked at.

    Attributes:
        step: counts from 1, skipped steps included.
        loss: as it was given; may be infinite or NaN.
        loss_scale: of this step's backward pass.
        skipped: whether the grad scaler left the step out.
        skip_rate: share of the last steps that were skipped.
        grad_norm: of the unscaled gradients; None where the step was skipped.
        nan_rate: share of the last steps whose loss, or gradient without a scaler, was not finite.
        non_finite_buffers: how many buffers were not finite; looked at in steps with trouble and now and then.
        first_bad_unit: the unit in which values stopped being finite in this step; "" where none was found.
        events: messages of this step, joined.
    """

    step: int
    loss: float | None
    loss_scale: float | None
    skipped: bool
    skip_rate: float
    grad_norm: float | None
    nan_rate: float
    non_finite_buffers: int | None
    first_bad_unit: str
    events: str


@runtime_checkable
class Log(Protocol):
    """Takes each record of a guard."""

    def write(self, record: GuardRecord) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class ScalarWriter(Protocol):
    """The part of `torch.utils.tensorboard.SummaryWriter` that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...

    def add_text(self, tag: str, text_string: str, global_step: int) -> Any: ...


class CsvLog:
    """One line a step, flushed at once; a file of an earlier run of the same training is continued.

    Raises:
        UsageError: the file is there and holds something else, or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._names = [field.name for field in fields(GuardRecord)]
        place = Path(path)
        try:
            is_new = not place.exists() or place.stat().st_size == 0
            if not is_new:
                with place.open(newline="", encoding="utf-8") as file:
                    found = next(csv.reader(file), [])
                if found != self._names:
                    raise UsageError(f"{place.name} is there and is no log of a guard; name another file")
            self._file = place.open("a", newline="", encoding="utf-8")
        except (OSError, csv.Error, UnicodeDecodeError) as error:
            raise UsageError(f"{place.name}: the log cannot be written ({error})") from error
        self._writer = csv.writer(self._file, lineterminator="\n")
        if is_new:
            self._put(self._names)

    def write(self, record: GuardRecord) -> None:
        values = [getattr(record, name) for name in self._names]
        if not self._file.closed:
            try:
                self._put([int(value) if isinstance(value, bool) else value for value in values])
            except OSError as error:  # a full disk does not end a training
                logger.warning("guard: the log ends at step %d (%s)", record.step, error.strerror)
                self.close()

    def _put(self, row: list[Any]) -> None:
        self._writer.writerow(row)
        self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closing writes what is left
            self._file.close()


class TensorBoardLog:
    """Scalars `guard/<field>` and texts `guard/events`, through a SummaryWriter that stays the caller's."""

    def __init__(self, writer: ScalarWriter) -> None:
        self._writer = writer

    def write(self, record: GuardRecord) -> None:
        for field in fields(record):
            value = getattr(record, field.name)
            if isinstance(value, int | float) and field.name != "step":
                self._writer.add_scalar(f"guard/{field.name}", float(value), record.step)
        if record.events:
            self._writer.add_text("guard/events", record.events, record.step)

    def close(self) -> None:
        """Nothing: the writer is the caller's."""


def open_log(place: str | os.PathLike[str] | Log | ScalarWriter) -> Log:
    """Return the log that was asked for: a path is a CSV file, what has `add_scalar` is TensorBoard's writer.

    Raises:
        UsageError: neither of them, and no `write` of its own.
    """
    if isinstance(place, str | os.PathLike):
        return CsvLog(place)
    if isinstance(place, ScalarWriter):
        return TensorBoardLog(place)
    if isinstance(place, Log):
        return place
    raise UsageError(
        f"log is {type(place).__name__}; allowed: a path, a SummaryWriter, an object with write(record) and close()"
    )

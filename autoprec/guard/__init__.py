"""The guard of a long training run: it watches, names the unit at fault, and moves it to FP32."""

from autoprec.guard.guard import TrainingGuard
from autoprec.guard.records import CsvLog, GuardEvent, GuardRecord, TensorBoardLog

__all__ = ["CsvLog", "GuardEvent", "GuardRecord", "TensorBoardLog", "TrainingGuard"]

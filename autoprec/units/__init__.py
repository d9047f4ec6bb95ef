"""Which modules of a model receive a precision, found by one dry run on a real batch."""

from autoprec.units.find import Unit, Units, find_units

__all__ = ["Unit", "Units", "find_units"]

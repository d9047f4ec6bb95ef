"""Floating-point formats as a table: IEEE 754-2019 binary16 and binary32, and Intel's definition of bfloat16."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Format", "FORMATS", "FP16", "BF16", "FP32"]


@dataclass(frozen=True, slots=True)
class Format:
    """One floating-point format. `torch_name` is the attribute of the torch module that holds its dtype."""

    name: str
    torch_name: str
    num_bits: int
    num_exponent_bits: int
    num_fraction_bits: int

    @property
    def num_bytes(self) -> int:
        return self.num_bits // 8

    @property
    def exponent_bias(self) -> int:
        return int(2 ** (self.num_exponent_bits - 1)) - 1

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return float((2.0 - 2.0**-self.num_fraction_bits) * 2.0**self.exponent_bias)

    @property
    def smallest_normal(self) -> float:
        return float(2.0 ** (1 - self.exponent_bias))

    @property
    def smallest_subnormal(self) -> float:
        return float(2.0 ** (1 - self.exponent_bias - self.num_fraction_bits))

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger value."""
        return float(2.0**-self.num_fraction_bits)


FP16 = Format("fp16", "float16", 16, 5, 10)
BF16 = Format("bf16", "bfloat16", 16, 8, 7)
FP32 = Format("fp32", "float32", 32, 8, 23)
FORMATS = {f.name: f for f in (FP16, BF16, FP32)}

"""The parts of benchmarks/survival.py: each tries one promise out and prints a figure for it."""

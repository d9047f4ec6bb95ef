"""The studies that benchmarks/proof.py counts; each makes one search or proof and returns what it found, as JSON."""

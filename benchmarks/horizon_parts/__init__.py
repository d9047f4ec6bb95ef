"""What benchmarks/horizon.py trains, in which precisions, and how its outcomes are summed up."""

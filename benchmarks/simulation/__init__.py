"""What benchmarks/simulate.py consists of: replicas of Freight, simulated."""

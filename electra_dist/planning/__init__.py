"""What a run costs, before it runs: memory, FLOPs, days, scaling."""

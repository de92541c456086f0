"""What a run tells: metrics, console, FLOPs, plan, report."""

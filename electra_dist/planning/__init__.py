"""Predictions of what a run costs before it starts: memory, FLOPs, days, scaling over nodes."""

"""Predicts what a run costs before it starts: memory, FLOPs, days, and how it scales over nodes."""

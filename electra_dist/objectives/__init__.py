"""Implements masking, corruption and the pretraining objectives. Start at `build_objective.py`."""

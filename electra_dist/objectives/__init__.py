"""Implements masking, corruption and the pretraining objectives, one file each. Start at `build_objective.py`."""

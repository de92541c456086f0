"""Masking, corruption and the objectives, one file each; `build` makes the objective that a config names."""

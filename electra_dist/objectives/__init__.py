"""Implements masking, corruption and the pretraining objectives, one file each; start reading at `build.py`."""

"""Implement what `import electra_dist` offers to notebooks and scripts: thin wrappers of the code that a run uses.

Limits: one process on one device, without DeepSpeed. A training of any length is a run (`launcher/pretrain.py`).
"""

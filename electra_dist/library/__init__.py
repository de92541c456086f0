"""Implement what `import electra_dist` offers to notebooks and scripts: one process on one device, no DeepSpeed."""

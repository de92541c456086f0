"""What DeepSpeed and Slurm start."""

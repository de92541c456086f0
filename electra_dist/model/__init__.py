"""The two towers, their heads and their initialisation; counts of parameters and FLOPs by arithmetic."""

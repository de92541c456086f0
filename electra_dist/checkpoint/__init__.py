"""Checkpoints: committed atomically, verified byte by byte, and loaded at any number of ranks and any ZeRO stage."""

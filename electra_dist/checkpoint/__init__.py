"""What a run remembers: committed atomically, loaded at any world size."""

"""When and how a run saves checkpoints."""

"""Save checkpoints atomically, verify every byte of them, and load them at any number of ranks and any ZeRO stage."""

"""Everything that knows DeepSpeed: the engine, its optimizers, learning rates, and the state of each ZeRO stage."""

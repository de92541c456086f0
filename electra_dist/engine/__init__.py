"""Everything that depends on DeepSpeed: the engine, the optimizers, the learning rate and the state of each stage."""

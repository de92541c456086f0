"""Drive DeepSpeed: the engine, the optimizers, the learning rate, and the training state at each ZeRO stage."""

"""What is learnt: masking, corruption and each objective, one file each; `build` makes the one a config names."""

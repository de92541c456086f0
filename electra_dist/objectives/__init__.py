"""What is learnt: masking and each objective, one file each."""

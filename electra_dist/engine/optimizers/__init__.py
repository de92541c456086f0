"""Optimizers of this package: AdamW, LAMB and Muon, each with operations over lists of tensors."""

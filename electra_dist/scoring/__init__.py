"""Scores of text by a pretrained model, as it came from pretraining."""

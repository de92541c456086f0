"""Pretrained weights: read from runs and Hugging Face folders, written to Hugging Face folders."""

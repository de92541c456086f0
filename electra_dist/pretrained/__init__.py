"""Reads pretrained weights from runs and Hugging Face folders, and writes them to Hugging Face folders."""

"""Weights in and out: from runs, and from and to Hugging Face folders."""

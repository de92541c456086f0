"""Evaluate pretrained encoders: fine-tune them on GLUE, SQuAD or custom tasks, fit probes, score minimal pairs."""

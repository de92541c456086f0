"""Evaluate pretrained models without fine-tuning: texts and minimal pairs by their heads, words by probes."""

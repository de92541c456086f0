"""Evaluate pretrained encoders by fine-tuning on GLUE, SQuAD and custom tasks, linear probes and minimal pairs."""

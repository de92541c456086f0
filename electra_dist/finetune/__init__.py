"""Evaluation of pretrained encoders: fine-tuning on GLUE, SQuAD and custom tasks, linear probes and minimal pairs."""

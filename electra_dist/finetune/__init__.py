"""Evaluate pretrained encoders on labelled texts: fine-tune them on GLUE, SQuAD or custom tasks, or fit probes."""

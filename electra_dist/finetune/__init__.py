"""What a pretrained encoder is worth: GLUE, SQuAD, any task from a file, linear probes and minimal pairs."""

"""SQuAD 1.1 and 2.0: windows over long passages, the task for fine-tuning, and the official metrics."""

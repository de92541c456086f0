"""Implement SQuAD 1.1 and 2.0: windows over long passages, the fine-tuning task, and the official metrics."""

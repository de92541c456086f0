"""Implement tagging, one label per word: files of tagged words, the fine-tuning task, F1 of named entities."""

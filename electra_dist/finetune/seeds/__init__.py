"""Runs the seeds of fine-tuning commands, one after another or in several processes, and resumes after interrupts."""

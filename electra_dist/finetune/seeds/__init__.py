"""Run the seeds of fine-tuning commands, one after another or in several processes, and resume after interrupts."""

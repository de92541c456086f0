"""The loop, the DeepSpeed engine, the optimizer and the schedule."""

"""SQuAD: windows over contexts, the task, its metrics."""

"""What a run reports: records of steps and evaluations, times, scored rows."""

"""Handle silent ranks in a supervisor: find out whether the run folder is the reason, and report a hang."""

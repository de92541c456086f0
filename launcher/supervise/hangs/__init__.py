"""What a supervisor does about silent ranks: whether the run folder is the reason, and the report of a hang."""

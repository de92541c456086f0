"""Fixtures of the report tests: `step_record` and `eval_record` make example records of a run."""

from support.run_records import eval_record, step_record

__all__ = ["eval_record", "step_record"]

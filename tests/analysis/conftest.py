"""Records of a small imaginary run."""

from support.run_records import eval_record, step_record

__all__ = ["eval_record", "step_record"]

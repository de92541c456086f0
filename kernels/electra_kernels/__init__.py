"""Fused operations of ELECTRA pretraining, one file for each subject.

How: `<op>.py` holds the definition in plain PyTorch ("the reference"), the autograd wrapper and the public function.
`triton/<op>.py`, where it exists, holds the Triton kernel and the code that launches it. It is a separate file for two
reasons: Triton is not installed everywhere, and Triton reads the variable TRITON_INTERPRET when a kernel is defined.
So the file is imported when its kernel is launched for the first time, and never on a machine that runs the reference.
`backend_choice.py` decides which implementation runs.
"""


class BackendUnavailable(Exception):
    """The implementation that the config asks for cannot run on this machine; the message says why and what to do."""

"""Fused operations: each is defined by the plain-PyTorch reference in its own file and has one public function.

`<op>.py` holds the reference, the autograd wrapper and the public function; `triton/<op>.py`, where there is one,
holds the Triton kernel and its launch. They are two files because Triton is not installed everywhere and reads its
interpreter switch when a kernel is defined: the second file is imported at the first launch and never on a machine
that runs the reference. `backend.py` decides which one runs.
"""


class BackendUnavailable(Exception):
    """The demanded implementation of an operation cannot run here. The text is one line with the next step."""

"""Provides fused operations: each file defines one by a plain-PyTorch reference and has one public function.

How: `<op>.py` holds the reference, the autograd wrapper and the public function. `triton/<op>.py`, where it exists,
holds the Triton kernel and its launch. The two are separate files because Triton is not installed everywhere and reads
TRITON_INTERPRET when a kernel is defined: the Triton file is imported at the first launch, and never on a machine that
runs the reference. `backend_choice.py` decides which implementation runs.
"""


class BackendUnavailable(Exception):
    """Error for a requested implementation of an operation that cannot run on this machine.

    The text is one line that states the reason and the next step.
    """

"""Runs launcher/pretrain.py in fp16 on a CPU, with a loss scale that overflows often.

DeepSpeed refuses fp16 on CPUs without instructions for it, although torch computes it on all; `is_fp16_supported` is
replaced, so that tests need no such CPU. The environment variable LOSS_SCALE holds JSON that replaces constants of
`engine/zero.py`, for example {"INITIAL_SCALE": 1048576.0, "STEPS_UNTIL_GROWTH": 3}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from electra_launcher.pretrain import main

from electra_dist.engine import zero

get_accelerator().is_fp16_supported = lambda: True
for name, value in json.loads(os.environ.get("LOSS_SCALE", "{}")).items():
    assert hasattr(zero, name)
    setattr(zero, name, value)

if __name__ == "__main__":
    sys.exit(main())

"""Know models of GPUs by their names: peak throughput, memory and bandwidths. A new GPU is added here alone.

Source: the vendors' data sheets. Peaks are dense 16-bit tensor figures with fp32 accumulation. A GPU that is not
listed has no peak, and no MFU is reported for it, nor for fp32 runs, because a guess would be worse than no figure.
"""

from __future__ import annotations

import re
from typing import Literal

# Words that the device's name must contain -> dense TFLOP/s. The first match counts, so "h100 pcie" is before "h100".
# A figure that is stated with sparsity is halved. V100 has no bf16, so its figure is that of fp16.
_PEAK_TFLOPS = {
    "gb200": 2500.0,
    "b200": 2250.0,
    "gh200": 989.4,
    "h200 nvl": 835.5,
    "h200": 989.4,
    "h100 nvl": 835.5,
    "h100 pcie": 756.0,
    "h100 hbm2e": 756.0,
    "h100": 989.4,
    "h800 pcie": 756.0,
    "h800": 989.4,
    "h20": 148.0,
    "a100": 312.0,
    "a800": 312.0,
    "a40": 149.7,
    "a30": 165.0,
    "a10": 125.0,
    "l40s": 362.0,
    "l40": 181.0,
    "l4": 121.0,
    "v100 pcie": 112.0,
    "v100": 125.0,
}

KNOWN_GPUS = tuple(words.upper() for words in _PEAK_TFLOPS if " " not in words)
GPUS_WITHOUT_BF16 = ("V100",)  # of KNOWN_GPUS
# Memory in GB. Some are sold with another size, too: A100 with 40, V100 with 16, GH200 with 144.
GPU_MEMORY_GB = {
    "GB200": 186,
    "B200": 180,
    "GH200": 96,
    "H200": 141,
    "H100": 80,
    "H800": 80,
    "H20": 96,
    "A100": 80,
    "A800": 80,
    "A40": 48,
    "A30": 24,
    "A10": 24,
    "L40S": 48,
    "L40": 48,
    "L4": 24,
    "V100": 32,
}
# Bytes per second of a GPU's memory, and those that it sends to the other GPUs of its node: half of the two-way NVLink
# figures. Only GPUs for which several nodes are planned have them.
MEMORY_BYTES_PER_S = {"A100": 2.0e12, "H100": 3.35e12, "H200": 4.8e12, "B200": 8e12, "GB200": 8e12}
NODE_LINK = {"A100": 300e9, "H100": 450e9, "H200": 450e9, "B200": 900e9, "GB200": 900e9}


def peak_flops(device_name: str, precision: Literal["bf16", "fp16", "fp32"] = "bf16") -> float | None:
    """Return the dense 16-bit peak of a GPU in FLOP/s; None for an unlisted GPU, a slice of a GPU (MIG), or fp32.

    `device_name` is the driver's name ("NVIDIA H100 80GB HBM3") or just the model ("H100"); case and punctuation do
    not matter. bf16 and fp16 have the same peak; V100 has fp16 only.
    """
    if precision == "fp32":
        return None
    name_words = set(re.split(r"[^a-z0-9]+", device_name.lower()))  # {"nvidia", "h100", "80gb", "hbm3"}
    if "mig" in name_words:
        return None
    for model_words, tflops in _PEAK_TFLOPS.items():
        if name_words.issuperset(model_words.split()):
            return tflops * 1e12
    return None

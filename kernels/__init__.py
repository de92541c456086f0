"""Fused operations, one file each: plain-PyTorch reference, Triton kernel, autograd wrapper, one public function."""

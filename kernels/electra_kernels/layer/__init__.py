"""Forward and backward passes of a layer's norms and GELU, for autograd functions that span several operations."""

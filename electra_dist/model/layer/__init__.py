"""A transformer layer's chains of operations before and after attention, each as one autograd function."""

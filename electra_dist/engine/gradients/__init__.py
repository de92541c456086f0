"""Add up and exchange the gradients of a step, and read the numbers of the step from the device."""

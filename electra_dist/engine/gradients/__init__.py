"""What happens to the gradients of a step between the backward pass and the update, and what the host reads of it."""

"""FairScale's pair of an optimizer that divides its state and a wrapper that reduces gradients to it."""

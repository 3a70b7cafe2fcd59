"""Proves, without a cluster, that the ranks of a layout never deadlock."""

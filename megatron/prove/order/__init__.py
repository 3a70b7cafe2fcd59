"""Proves, without a cluster, that the ranks of a layout never wait for each other in a ring."""

"""Proofs about a layout: that it trains what one process trains, and that its ranks never wait for ever."""

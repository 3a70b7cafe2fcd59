"""Proofs about a layout: it trains what one process trains, and its ranks do not deadlock."""

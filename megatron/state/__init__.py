"""Describes which part of a parameter a rank holds, updates and saves."""

"""tools/check_layout.py: shows that a layout trains what one process trains. Its command line is in `cli`."""

"""The fast encoder and the checks that its ids equal those of the exact one. Importing it loads nothing."""

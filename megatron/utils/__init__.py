"""Small tools that know nothing of models or ranks beyond the numbers they are given."""

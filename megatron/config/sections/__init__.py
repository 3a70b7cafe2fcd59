"""The sections of a run's settings: one frozen, keyword-only dataclass each, with a help text for every field.

Field name = Megatron-LM's flag with underscores; `--no-X` and `--disable-X` switches are booleans, default True.
"""

"""Calls and settings of other libraries, for any model: DeepSpeed's, FairScale's and DDP's."""

"""FairScale's OSS, an optimizer with sharded state, and ShardedDataParallel, which reduces gradients to its owners."""

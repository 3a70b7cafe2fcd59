"""FairScale's OSS, an optimizer with sharded state, and ShardedDataParallel, which reduces a gradient to the owner of
its state."""

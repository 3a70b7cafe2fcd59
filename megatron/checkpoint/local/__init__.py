"""Non-persistent checkpoints on the disk, or in the memory, of each machine: every rank writes its share there.

    DIR/NAME/rank_00003/iter_0000100/       the share of rank 3, on its machine and, as a copy, on others
        mp_rank_01/distrib_optim_00001.pt   its files, as in any checkpoint
        share.json                          their checksums, and the manifest's entries about them

NAME is that of the run's save directory (`lineage.py`). No rank sees all shares, so none commits for the others: a step
is whole as soon as each of its shares is somewhere, and older ones are removed only then.
"""

"""Non-persistent checkpoints on the disk, or in the memory, of each machine: every rank writes its share there.

    DIR/NAME/rank_00003/iter_0000100/       The share of rank 3, on its machine. Copies may be on others.
        mp_rank_01/distrib_optim_00001.pt   Its files, as in any checkpoint.
        share.json                          Their checksums, and the manifest's entries about them.

NAME identifies the run's save directory (`lineage.py`). No rank sees all shares, so none commits for the others. A step
is complete once each of its shares is on some machine. Older steps are removed only then.
"""

"""Files in the format of `torch.save`: written without a second copy in memory, read without running code from them.

safe_load    Loads a file by torch's own loader, after scanning its pickle.
torch_file   Reads files of other programs without torch's loader. Tensors are views of the mapped file.
writer       Writes plain values and tensors. A tensor can be computed when it is written.
"""

"""The files that `torch.save` writes: written without holding a copy, and read without running what they name.

safe_load    the content of a file, by torch's own loader, after its pickle was scanned
torch_file   the same without torch's loader, for files of other programs; tensors are views of the mapped file
writer       a file of plain values and tensors, some of them made while it is written
"""

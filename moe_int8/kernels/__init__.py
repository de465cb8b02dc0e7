"""Triton kernels, one operator a file, each with its launcher. Imported only for tensors on a GPU (or interpreted)."""

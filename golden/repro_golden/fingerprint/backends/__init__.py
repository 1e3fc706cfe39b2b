"""Where tensors are read: compiled loops or NumPy on the CPU, Triton's kernels on a GPU."""

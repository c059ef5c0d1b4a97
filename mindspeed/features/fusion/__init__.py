"""Features that fuse operations into fewer kernels."""

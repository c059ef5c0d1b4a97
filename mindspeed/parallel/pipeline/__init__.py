"""Pipeline parallelism: what a stage holds and how stages take turns."""

"""Modules that are served under the names of packages that Megatron imports and that are absent."""

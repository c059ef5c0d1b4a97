"""What differs between megatron-core versions, and stand-ins for packages that are absent."""

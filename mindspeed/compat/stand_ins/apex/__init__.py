"""Stand-in for apex where it is absent: the layer norm that Megatron's local specs ask for."""

"""Stand-in for apex where it is absent: only the layer norm that Megatron's local layer specs ask
for."""

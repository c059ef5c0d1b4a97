"""Features around training: reproducibility, monitoring and host overhead."""

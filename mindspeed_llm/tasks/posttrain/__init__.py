"""Post-training, one file a stage."""

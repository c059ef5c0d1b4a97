"""What every multimodal model has in common."""

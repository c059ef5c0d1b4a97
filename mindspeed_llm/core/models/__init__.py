"""Models that trainings build."""

"""What is trained for: one short file a task."""

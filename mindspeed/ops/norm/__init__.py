"""The body that every norm shares."""

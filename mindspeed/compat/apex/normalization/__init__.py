"""Layer norm of the apex stand-in."""

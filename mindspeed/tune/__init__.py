"""What a step costs: floating-point operations, counted."""

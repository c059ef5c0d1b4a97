"""Features of mixture-of-experts layers."""

"""Where users of MindSpeed-LLM look for the model."""

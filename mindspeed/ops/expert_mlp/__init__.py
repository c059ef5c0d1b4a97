"""The GEMMs of SwiGLU experts, on tokens that are gathered and added up by row numbers."""

"""The base class and the registry of multimodal models."""

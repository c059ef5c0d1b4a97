"""Models: built, registered and made ready for FSDP2."""

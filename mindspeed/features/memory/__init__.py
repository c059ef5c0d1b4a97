"""Features that change what memory holds."""

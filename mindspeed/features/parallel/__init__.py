"""Features that change how the model is divided over ranks."""

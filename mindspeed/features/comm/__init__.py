"""Features that change when and what ranks communicate."""

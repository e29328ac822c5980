"""Attempts to get back what a model was made to forget. Each is a function that leaves the model as it was."""

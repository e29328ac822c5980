"""Judges of steered answers: whether they say a concept, well, and in answer to what was asked."""

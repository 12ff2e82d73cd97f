"""Bringing a layer's parameters to where they are needed: checkpoints today."""

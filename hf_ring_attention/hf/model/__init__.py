"""What a model is, what of it is computed, and which patterns it has."""

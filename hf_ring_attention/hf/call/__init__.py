"""The hooks around a model."""

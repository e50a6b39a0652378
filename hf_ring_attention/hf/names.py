"""The name that users write."""

#: The name of the attention implementation, and of the config's attribute that holds the patterns.
IMPLEMENTATION = "ring_dilated"

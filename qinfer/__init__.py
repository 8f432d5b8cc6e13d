"""qinfer."""

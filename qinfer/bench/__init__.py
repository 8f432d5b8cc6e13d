"""What `qinfer plan` computes."""

"""What `qinfer bench` measures and `qinfer plan` computes."""

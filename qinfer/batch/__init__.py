"""A file of requests in, a file of answers out: what `qinfer batch` runs."""

"""The cache over several nodes, from the daemon's side: who the members are, asking them, serving them."""

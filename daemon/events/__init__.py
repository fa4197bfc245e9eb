"""What happened on the node, as a bounded log of typed events that clients can follow."""

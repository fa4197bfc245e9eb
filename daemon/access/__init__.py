"""Who may do what, and how much of the node each user may take."""

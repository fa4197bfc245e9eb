"""The control API: what operators see of a node, as values and as messages, and what they may change."""

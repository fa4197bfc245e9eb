"""What operators see of the controllers of runs, and what they ask of them."""

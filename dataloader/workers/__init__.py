"""The worker processes that prepare batches: a pool that outlives the death of any of them."""
